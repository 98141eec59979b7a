#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

struct RankState;

/// CommError::fate() of a process that serves a store and no longer answers.
inline constexpr const char* kNoAnswer = "no answer";

/// The process that serves a store.
struct StoreHost {
  std::vector<int> ranks = {};        ///< its rank, blamed if it is lost; empty: it is no rank
  std::string name = "the launcher";  ///< in messages
};

/// A small key-value store shared by all ranks of a run: for rendezvous, votes and agreements,
/// which never use the training communicator. Keys are written once. Thread-safe.
class Store {
 public:
  virtual ~Store() = default;
  /// @throws InvalidArgument if the key is taken by another value, or the value is too large for
  /// the store; CommError if the store is lost
  virtual void set(const std::string& key, std::string_view value) = 0;
  /// Waits until the key is there. @throws CommError(Timeout) naming the key at the deadline
  virtual std::string get(const std::string& key, std::chrono::milliseconds deadline) = 0;
  virtual bool has(const std::string& key) = 0;
  /// Removes the keys directly under "<name>/" once each of `readers` has called it.
  virtual void leave(const std::string& name, int readers) = 0;

  /// Sends a heartbeat with this rank's state to the process that serves the store, if any.
  /// @throws CommError if the store is lost
  virtual void beat(int rank, const RankState& state) {
    (void)rank;
    (void)state;
  }
  /// The same store over its own connection, with this time limit for answers; null if the store
  /// has no connections. @throws CommError
  virtual std::shared_ptr<Store> separate(std::chrono::milliseconds answer_time) const {
    (void)answer_time;
    return nullptr;
  }
  /// The server is known to be lost: calls that wait for an answer throw CommError now, and later
  /// calls take a second at most. Any thread.
  virtual void give_up() {}
};

/// Every rank contributes `value` under `name`; returns all values by rank. `name` is new for each
/// exchange (put the step in it). The store removes the values once all ranks have them.
/// @throws CommError(Timeout) naming the ranks that did not answer, on every rank that did
std::vector<std::string> exchange(Store& store, const std::string& name, int rank, int world_size,
                                  std::string_view value, std::chrono::milliseconds deadline);

}  // namespace tessera::comm
