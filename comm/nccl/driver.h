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

/// Status of an NCCL call or communicator.
struct NcclStatus {
  enum class State : std::uint8_t {
    Ready,
    InProgress,  ///< only status() and abort() may be called
    Failed
  };
  State state = State::Ready;
  bool remote = false;    ///< failure of a peer or of the network
  std::string text = {};  ///< NCCL's description of a failure
};

/// A point in the communication stream.
class NcclEvent {
 public:
  virtual ~NcclEvent() = default;
  /// Does not wait. Any thread. @throws CudaError if the device's work failed
  virtual bool is_done() const = 0;
};

/// NCCL and its stream for one rank on one GPU. Thin, so that everything else can be tested without
/// a GPU. Implemented by a plugin.
class NcclDriver {
 public:
  virtual ~NcclDriver() = default;
  /// "2.28.9"
  virtual std::string version() const = 0;
  /// A driver for the same GPU, with its own communicator and stream. @throws CudaError
  virtual std::unique_ptr<NcclDriver> open_again() const = 0;

  // NCCL calls. Any thread, one at a time; only destroy and abort wait for peers.

  /// Called by one rank, which sends the id to the others.
  virtual std::string make_unique_id() = 0;
  virtual NcclStatus init(std::string_view unique_id, int rank, int world_size) = 0;
  virtual NcclStatus status() = 0;
  /// Queues one or more collectives of device memory on the communication stream, several as one
  /// group. `collectives` contains no barriers.
  virtual NcclStatus run(std::span<const Collective> collectives) = 0;
  /// Flushes queued collectives; call destroy() once the status is Ready.
  virtual NcclStatus finalize() = 0;
  virtual void destroy() noexcept = 0;
  /// Aborts collectives under way and frees the communicator, in any state. May block.
  virtual void abort() noexcept = 0;

  // The streams. @throws CudaError

  /// Makes later work of the communication stream wait for the compute stream's work so far.
  virtual void wait_for_compute() = 0;
  /// Makes later work of the compute stream wait for the event.
  virtual void hold_back_compute(const NcclEvent& event) = 0;
  virtual std::unique_ptr<NcclEvent> record() = 0;
  /// Queue a copy on the communication stream; host memory is of the backend's host_allocator().
  virtual void copy_to_device(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy_to_host(void* to, const void* from, std::size_t bytes) = 0;
};

/// Opens NCCL for a context's device. @throws Unsupported naming what is missing
using NcclOpener = std::function<std::unique_ptr<NcclDriver>(Context& context)>;

/// Changes with every incompatible change of the interface.
inline constexpr int kNcclPluginVersion = 5;

}  // namespace tessera::comm
