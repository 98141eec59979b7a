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

/// Lets NCCL move data only if all ranks make the same launch. NCCL can't carry signatures, and a
/// host message for each launch would make every collective wait for the slowest host. So ranks
/// exchange signatures over the store only for launches that CallHistory did not predict.
///
/// Ranks with equal histories predict the same launch. If two ranks launch different collectives,
/// at least one deviates from the prediction: it publishes its signature and asks the others for
/// theirs. The watchdogs of ranks that made the predicted launch answer, so that the mismatch is
/// found. Until the failure aborts it, a predicted launch waits on the device for the missing rank
/// and moves no data.
///
/// Cost: a predicted launch compares 64 bytes; else each of W ranks makes W + 2 requests to the
/// store, one after another. Labels are compared by their first 40 bytes.
class CallComparison {
 public:
  /// @param prefix  prefix of the store's keys; unique per communicator
  CallComparison(std::shared_ptr<Store> store, std::string prefix, int rank, int world_size,
                 SubgroupPtr group = {});

  /// Called before each launch, by one thread. Waits for the other ranks if the launch is not the
  /// predicted one.
  /// @param launch   the launch as named in messages, with its number
  /// @param parts    the collectives of the launch
  /// @param is_over  polled while waiting; true, once communication has failed, ends the wait
  /// @return the reason not to launch, or nothing
  std::optional<NcclSuspicion> check(const Collective& launch, std::span<const Collective> parts,
                                     const std::function<bool()>& is_over);
  /// Publishes this rank's signature of a predicted launch if another rank asks for it. Called
  /// regularly by another thread. @throws CommError if the store is lost
  void answer();

 private:
  /// A launch that a rank made or is about to make.
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
  const SubgroupPtr group_;
  mutable std::mutex mutex_;
  CallHistory history_;           // changed by check() only, under mutex_
  std::uint64_t comparison_ = 0;  // number of the next; equal on ranks with equal histories
};

}  // namespace tessera::comm
