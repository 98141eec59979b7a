#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/collective.h"
#include "comm/host_memory.h"
#include "comm/nccl/driver.h"
#include "core/base/storage.h"

namespace tessera::comm {

/// A collective on the communication stream, from its start until the device is done with it.
struct NcclItem {
  using Time = std::chrono::steady_clock::time_point;

  /// A host buffer, and its copies: pinned, and on the device.
  struct Staged {
    std::shared_ptr<Storage> device;
    std::unique_ptr<HostMemory> pinned;
    std::byte* user = nullptr;
    std::size_t bytes = 0;
    bool is_result = false;
  };

  Collective collective;  ///< as messages call it
  std::unique_ptr<NcclEvent> start, done;
  std::vector<Staged> staged;
  float token = 0.0F;                ///< what a barrier sums
  bool host_waits = false;           ///< results go to the host, or it is a barrier
  std::atomic<bool> waited = false;  ///< wait() was called
  /// When the device was first seen to have reached it. The prober's own.
  std::optional<Time> started;
  std::atomic<bool> has_started = false;  ///< the same for other threads
};

/// The items that the device is not known to be done with, oldest first: a collective starts when
/// those before it are done, whenever the host queued it.
class PendingCollectives {
 public:
  /// Any thread.
  void push(std::shared_ptr<NcclItem> item);
  std::shared_ptr<NcclItem> oldest() const;
  bool is_empty() const { return oldest() == nullptr; }
  /// Whether the caller has waited for all of them.
  bool all_waited() const;

  /// Forgets what is done, and notes what has started. One thread at a time. No lock is held while
  /// the device is asked, which may block.
  /// @return the oldest item, if it started longer ago than its deadline; else null
  /// @throws CudaError if the device's work failed
  std::shared_ptr<NcclItem> advance(NcclItem::Time now);

 private:
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<NcclItem>> items_;
};

}  // namespace tessera::comm
