#pragma once

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

/// Lets NCCL move data only if all ranks make the same launch. Other backends send a signature with
/// each collective; NCCL has no message to put it in, and a message of the host for each launch
/// would make every collective wait for the slowest host. So ranks exchange signatures over the
/// store only where a launch is not the one that its CallHistory predicts.
///
/// Ranks that launched the same so far predict the same. A launch that all ranks make is therefore
/// the same on all: of two ranks either both made the predicted one, or one of them compared. A
/// rank that deviates publishes its signature and waits for those of the others. Ranks that made
/// the predicted launch publish theirs when their watchdog finds the question; that is the
/// mismatch. Their data waits on the device for a rank that does not come, until the verdict aborts
/// it.
///
/// Cost: a comparison of 64 bytes for a predicted launch. Else W + 2 requests to the store by each
/// of W ranks, one after the other. Labels are compared by their first 40 bytes.
class CallComparison {
 public:
  /// @param prefix  of its keys; new for each communicator
  CallComparison(std::shared_ptr<Store> store, std::string prefix, int rank, int world_size);

  /// Called before each launch, by one thread. Waits for the other ranks if the launch is not the
  /// predicted one.
  /// @param launch   the launch as messages name it, with its number
  /// @param parts    the collectives that it consists of
  /// @param is_over  polled while waiting: communication has failed; then returns nothing
  /// @return the reason not to launch, or nothing
  std::optional<NcclSuspicion> check(const Collective& launch, std::span<const Collective> parts,
                                     const std::function<bool()>& is_over);
  /// Publishes this rank's signature if others ask for a launch that it made as predicted. Called
  /// regularly by another thread. @throws CommError if the store is lost
  void answer();

 private:
  /// What a rank launched, or would launch, under a number.
  struct Call {
    std::uint64_t number = 0;
    std::string signatures;
    friend bool operator==(const Call&, const Call&) = default;
    std::string encode() const;
    static Call decode(const std::string& text);
  };

  std::optional<NcclSuspicion> compare(const Collective& launch, const std::string& signatures,
                                       const std::function<bool()>& is_over);
  CommError mismatch(const std::vector<Call>& calls) const;
  std::string key(std::string_view what) const;

  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const int rank_, world_size_;
  mutable std::mutex mutex_;
  CallHistory history_;           // changed by check() only, under mutex_
  std::uint64_t comparison_ = 0;  // number of the next one, equal on ranks that launched the same
};

}  // namespace tessera::comm
