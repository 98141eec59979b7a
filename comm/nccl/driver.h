#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "comm/collective.h"

namespace tessera {
class Context;
}

namespace tessera::comm {

/// What NCCL says of a call, or of its communicator.
struct NcclStatus {
  enum class State : std::uint8_t {
    Ready,
    InProgress,  ///< nothing else may be called but status() and abort()
    Failed
  };
  State state = State::Ready;
  bool remote = false;    ///< of a failure: a peer's, or the network's
  std::string text = {};  ///< of a failure, in NCCL's words
};

/// A place in the order of the communication stream's work.
class NcclEvent {
 public:
  virtual ~NcclEvent() = default;
  /// Does not wait. Any thread. @throws CudaError if the device's work failed
  virtual bool is_done() const = 0;
};

/// NCCL, and the stream that its collectives run on, for one rank on one GPU: as thin as can be, so
/// that everything else can be tried without a GPU. Comes from a plugin.
class NcclDriver {
 public:
  virtual ~NcclDriver() = default;
  /// "2.28.9"
  virtual std::string version() const = 0;

  // NCCL itself. One thread at a time, but any; none waits for a peer except destroy and abort.

  /// For one rank, which gives it to all others.
  virtual std::string make_unique_id() = 0;
  virtual NcclStatus init(std::string_view unique_id, int rank, int world_size) = 0;
  virtual NcclStatus status() = 0;
  /// Queues collectives on the communication stream, several as one group. What the pointers mean
  /// is said in Collective; they are of the device. At least one, no barrier.
  virtual NcclStatus run(std::span<const Collective> collectives) = 0;
  /// Flushes what is queued; destroy() may follow when the status is Ready.
  virtual NcclStatus finalize() = 0;
  virtual void destroy() noexcept = 0;
  /// Ends what is under way and frees the communicator, whatever its state. May block.
  virtual void abort() noexcept = 0;

  // The streams. @throws CudaError

  /// What comes next on the communication stream waits for the compute stream's work so far.
  virtual void wait_for_compute() = 0;
  /// What comes next on the compute stream waits for the event.
  virtual void hold_back_compute(const NcclEvent& event) = 0;
  virtual std::unique_ptr<NcclEvent> record() = 0;
  /// On the communication stream; `from` is memory of the backend's host_allocator().
  virtual void copy_to_device(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy_to_host(void* to, const void* from, std::size_t bytes) = 0;
};

/// Opens NCCL for a context's device. @throws Unsupported naming what is missing
using NcclOpener = std::function<std::unique_ptr<NcclDriver>(Context& context)>;

/// Changes whenever a plugin and a program may not understand each other.
inline constexpr int kNcclPluginVersion = 2;

}  // namespace tessera::comm
