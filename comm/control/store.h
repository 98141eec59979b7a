#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

struct RankState;

/// CommError::fate() of a store's server that no longer answers.
inline constexpr const char* kNoAnswer = "no answer";

/// The process that serves a store.
struct StoreHost {
  std::vector<int> ranks = {};        ///< its rank, blamed if it does not answer; empty: not a rank
  std::string name = "the launcher";  ///< in messages
};

/// Key-value store shared by all ranks of a run, for coordination outside of the training
/// communicator. Keys are written once. Thread-safe.
class Store {
 public:
  virtual ~Store() = default;
  /// @throws InvalidArgument if the key has another value, or the value is too large; CommError if
  ///   the store is lost
  virtual void set(const std::string& key, std::string_view value) = 0;
  /// Waits until the key is set. @throws CommError(Timeout) naming the key at the deadline
  virtual std::string get(const std::string& key, std::chrono::milliseconds deadline) = 0;
  virtual bool has(const std::string& key) = 0;
  /// Call once per reader. The last of `readers` calls removes the keys directly under "<name>/".
  virtual void leave(const std::string& name, int readers) = 0;

  /// Sends a heartbeat with this rank's state to the process that serves the store, if any.
  /// @throws CommError if the store is lost
  virtual void beat(int /*rank*/, const RankState& /*state*/) {}
  /// The same store over a separate connection, with this time limit for answers; null if the store
  /// has no connections. @throws CommError
  virtual std::shared_ptr<Store> separate(std::chrono::milliseconds /*answer_time*/) const {
    return nullptr;
  }
  /// Declares the server lost: waiting calls throw CommError now, later calls within 1 s. Any
  /// thread.
  virtual void give_up() {}
};

/// Every rank contributes `value` under `name`; returns all values by rank. `name` is unique for
/// each exchange (put the step in it). The store removes the values once all ranks have them.
/// @throws CommError(Timeout) naming the ranks that did not answer, on every rank that did
std::vector<std::string> exchange(Store& store, const std::string& name, int rank, int world_size,
                                  std::string_view value, std::chrono::milliseconds deadline);

}  // namespace tessera::comm
