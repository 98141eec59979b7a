#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/control/store.h"
#include "comm/nccl/call_history.h"
#include "comm/nccl/position.h"

namespace tessera::comm {

/// Sees to it that no launch moves data unless all ranks call the same, without a message for each.
///
/// Ranks that have launched the same so far expect the same next (see CallHistory). So a rank
///
/// - that calls what is expected launches at once, with no message: it costs the comparison of 64
/// bytes;
/// - that calls something else, or expects nothing, tells the others through the store, and
///   launches when all have said the same.
///
/// Therefore a launch that all ranks make is the same on all: any two of them both called what was
/// expected, or one of them compared. A rank that goes its own way is not met by the others'
/// messages, since they expected their call and launched it. It asks; their watchdogs answer that
/// they have launched that number, as expected; and that is the mismatch. The data of the others
/// waits for a rank that does not come, on the device, until the verdict aborts it: nothing is
/// computed from it. Whoever is in the minority is named, on whichever side it launched.
///
/// Messages are sent in the first step (one comparison for each of its launches, unless it calls
/// the like twice), for a few launches at the start of the second, and where a run turns to
/// something new: its first evaluation, its end. For a comparison on which they agree, each rank
/// makes three requests, one after the other, and rank 0 one more for each rank: of W ranks the
/// store serves 4 W for each launch of the first step, and none from the third step on. A mismatch
/// is found in about the time between two looks of the watchdog at the store
/// (NcclOptions::store_poll) once the ranks have come to it.
///
/// Limits: labels are compared by their first 40 bytes, as elsewhere. A rank that calls nothing at
/// all, or once more than the others, is missing or misses the others, at the deadline.
class CallComparison {
 public:
  /// @param prefix       of its keys; new for each communicator
  /// @param answer_time  once ranks are known to disagree, how long those that have not said
  ///   what they call are waited for
  CallComparison(std::shared_ptr<Store> store, std::string prefix, int rank, int world_size,
                 std::chrono::milliseconds answer_time);

  /// Called for each launch, before it. Waits for the other ranks if it is not the expected one.
  /// @param launch   as messages call it, with its number
  /// @param parts    the collectives that it consists of
  /// @param is_over  asked four times a second or more: whether to give up waiting, because the
  ///   launch is late or communication has failed; then returns nothing
  /// @return why not to launch, if there is a reason. One thread.
  std::optional<NcclSuspicion> check(const Collective& launch, std::span<const Collective> parts,
                                     const std::function<bool()>& is_over);
  /// Tells ranks that ask what this rank has launched without asking. Another thread, now and then.
  /// @throws CommError if the store is lost
  void answer();

 private:
  /// Where a rank stands: at a number that it would launch with this call; or, if the call is
  /// empty, behind all that were expected, up to that number.
  struct Stand {
    std::uint64_t number = 0;
    std::string call;
    friend bool operator==(const Stand&, const Stand&) = default;
    std::string encode() const;
    static Stand decode(const std::string& text);
  };
  using Stands = std::vector<std::optional<Stand>>;

  std::optional<NcclSuspicion> compare(const Collective& launch, const std::string& call,
                                       const std::function<bool()>& is_over);
  bool collect(Stands& stands, std::chrono::milliseconds wait);
  bool is_agreed(std::chrono::milliseconds wait);
  CommError mismatch(const Stands& stands) const;
  void passed(std::string call, bool compared);
  std::string key(std::string_view what) const;

  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const int rank_, world_size_;
  const std::chrono::milliseconds answer_time_;
  CallHistory history_;  // the caller's
  mutable std::mutex mutex_;
  std::uint64_t comparison_ = 0;  // its number, equal on ranks that have launched the same
  std::uint64_t passed_ = 0;      // launches that may be made
};

}  // namespace tessera::comm
