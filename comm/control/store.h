#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

struct RankState;

/// CommError::fate() of whoever serves a store that no longer answers.
inline constexpr const char* kNoAnswer = "no answer";

/// Who serves a store.
struct StoreHost {
  std::vector<int> ranks = {};        ///< the culprit if it is lost; none: it is no rank
  std::string name = "the launcher";  ///< how messages call it
};

/// A small key-value store that all ranks of a run share: rendezvous, votes and agreements go
/// through it, never through the training communicator. Keys are written once. Thread-safe.
class Store {
 public:
  virtual ~Store() = default;
  /// @throws InvalidArgument if the key is taken by another value, or the value is too large for
  /// the store; CommError if the store is lost
  virtual void set(const std::string& key, std::string_view value) = 0;
  /// Waits until the key is there. @throws CommError(Timeout) naming the key at the deadline
  virtual std::string get(const std::string& key, std::chrono::milliseconds deadline) = 0;
  virtual bool has(const std::string& key) = 0;
  /// Called once by each of `readers` who share the keys directly under "<name>/" and needs them no
  /// more; when all have called it, these keys are forgotten.
  virtual void leave(const std::string& name, int readers) = 0;

  /// Tells who serves the store what this rank does, and so that it is alive. What is not served by
  /// another process has nobody to tell.
  /// @throws CommError if the store is lost
  virtual void beat(int rank, const RankState& state) {
    (void)rank;
    (void)state;
  }
  /// The same store over a connection of its own, which gives up on an answer after so long; null
  /// if there is no connection. @throws CommError
  virtual std::shared_ptr<Store> separate(std::chrono::milliseconds answer_time) const {
    (void)answer_time;
    return nullptr;
  }
  /// Who serves the store is known to be lost: calls that wait for its answer end now, with
  /// CommError, and later ones, made to tell others why, take a second at most. Any thread.
  virtual void give_up() {}
};

/// Every rank contributes `value` under `name`; returns all values by rank.
/// `name` must be new for each agreement (put the step in it). The store forgets the values when
/// all ranks have them.
/// @throws CommError(Timeout) that names the ranks that did not answer, on every rank that did
std::vector<std::string> exchange(Store& store, const std::string& name, int rank, int world_size,
                                  std::string_view value, std::chrono::milliseconds deadline);

}  // namespace tessera::comm
