#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>

namespace tessera::comm {

/// What has been called by number, and what is expected next if that goes on as it did before: what
/// came after the place in the past whose surroundings are most like now. A function of the calls
/// alone, so ranks with the same past expect the same.
///
/// Training calls the same in every step. So the second step is expected but for a few calls at its
/// beginning, and later ones whole; an evaluation is expected from its second time on, and at its
/// time, if that is the same again. The past is the last 4096 calls: a cycle that is longer than
/// that costs a few surprises each time. Not thread-safe.
class CallHistory {
 public:
  static constexpr std::size_t kKept = 8192;  ///< for find()

  /// Null if nothing like now has been seen.
  const std::string* expected() const { return next_ ? &calls_[*next_] : nullptr; }
  /// Takes about 0.1 us for what was expected, else 0.3 ms or so.
  void add(std::string call);
  /// How many there were.
  std::uint64_t size() const { return first_ + calls_.size(); }
  /// Null if it is not kept any more, or has not been called.
  const std::string* find(std::uint64_t number) const;

 private:
  std::optional<std::size_t> most_alike() const;

  std::deque<std::string> calls_;
  std::uint64_t first_ = 0;          // number of the oldest that is kept
  std::optional<std::size_t> next_;  // where the expected one is
};

}  // namespace tessera::comm
