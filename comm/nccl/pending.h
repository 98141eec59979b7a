#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/collective.h"
#include "comm/nccl/driver.h"
#include "core/base/storage.h"

namespace tessera::comm {

/// A collective from its start until its buffers are free.
struct NcclItem {
  /// A host buffer with its pinned and device copies.
  struct Staged {
    std::shared_ptr<Storage> device, pinned;
    std::byte* user = nullptr;
    std::size_t bytes = 0;
    bool is_result = false;
  };

  Collective collective;            ///< as named in messages; numbered at its launch
  std::shared_ptr<NcclEvent> done;  ///< end of its launch; null until launched
  std::vector<Staged> staged;
  float token = 0.0F;                ///< summed by a barrier
  bool host_waits = false;           ///< wait() blocks: host buffers, or a barrier
  std::atomic<bool> waited = false;  ///< wait() was called
};

/// Collectives launched together, usually one.
struct NcclLaunch {
  using Time = std::chrono::steady_clock::time_point;

  /// Stands for the launch in messages and signatures. For a group: kind of the first collective,
  /// joined labels, and the sums of elements and of deadlines.
  Collective collective;
  std::vector<std::shared_ptr<NcclItem>> items;
  std::shared_ptr<NcclEvent> start, done;
  std::shared_ptr<FlightRecorder> recorder;  ///< records its start and end; may be null
  std::uint64_t entry = 0;                   ///< of the recorder
  /// Time at which the prober first saw that the device had reached it. Used by the prober only.
  std::optional<Time> started;
  std::atomic<bool> has_started = false;  ///< `started` is set; for other threads
};

/// Launches not known to be finished on the device, oldest first.
class PendingCollectives {
 public:
  /// Any thread.
  void push(std::shared_ptr<NcclLaunch> launch);
  /// Records the remaining launches as failed.
  void record_failure();
  std::shared_ptr<NcclLaunch> oldest() const;
  bool is_empty() const { return oldest() == nullptr; }
  /// Whether the caller has waited for all of them.
  bool all_waited() const;

  /// Removes finished launches and marks started ones. One thread at a time. Polls the device
  /// without a lock, because polling may block.
  /// @return the oldest launch if its deadline has passed, else null
  /// @throws CudaError if the device's work failed
  std::shared_ptr<NcclLaunch> advance(NcclLaunch::Time now);

 private:
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<NcclLaunch>> launches_;
};

}  // namespace tessera::comm
