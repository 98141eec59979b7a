#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>

namespace tessera::comm {

/// A rank's calls, numbered from 0, and a prediction of the next one: the call that followed the
/// previous occurrence of the last two calls, or else of the last one. Depends on the calls alone,
/// so ranks with equal histories predict the same. Not thread-safe.
///
/// Identical training steps are predicted from the third on; an evaluation in between costs a few
/// wrong predictions.
class CallHistory {
 public:
  static constexpr std::size_t kKept = 8192;

  /// Null if there is no prediction.
  const std::string* expected() const { return find(next_); }
  void add(std::string call);
  /// Number of calls so far.
  std::uint64_t size() const { return first_ + calls_.size(); }
  /// Null if the call is older than the last kKept, or not made yet.
  const std::string* find(std::uint64_t number) const;

 private:
  std::deque<std::string> calls_;
  std::uint64_t first_ = 0;                              // number of calls_.front()
  std::uint64_t next_ = 0;                               // number of the call predicted to repeat
  std::unordered_map<std::string, std::uint64_t> last_;  // newest number of a call, or of two
};

}  // namespace tessera::comm
