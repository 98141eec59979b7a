#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "core/base/context.h"

namespace tessera {

/// Work of a device that is captured once and then started again as a whole, by one call instead of
/// one per kernel; on an NVIDIA GPU a CUDA graph, or several with the host's actions in between.
///
/// It runs on the same memory with the same arguments every time. What is to differ between runs
/// must lie in tensors from outside, which are written before run(). Tensors made by the work keep
/// their memory as long as this lives, and hold what the last run left there.
///
/// While captured, work may neither read values nor wait for the device, and nothing that is made
/// on first use can be: run it once before.
class Replay {
 public:
  /// Calls `work`, whose kernels are kept and not run. The memory that they need stays taken; it is
  /// booked as Workspace of "captured work".
  ///
  /// @param within  of the same context: its memory is shared, for work that never runs at the same
  ///   time. What tensors made by `work` hold is lost when the other work runs
  /// @throws Unsupported on a device that captures nothing; InternalError if the work waits for the
  ///   device; what `work` throws. The context is usable afterwards
  Replay(std::shared_ptr<Context> context, const std::function<void()>& work,
         const Replay* within = nullptr);
  ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  /// Queues the work, and calls what lies between its parts.
  /// @throws what such a call throws; the rest is not queued then
  void run();

  /// Calls `action` now; if work of `context` is being captured, it is called at this place of each
  /// run() instead, and is no part of the work: for what cannot be captured, or should not, as a
  /// collective with its deadline. It may queue work, and wait for the device. What it refers to
  /// must outlive the Replay.
  /// @throws what `action` throws; CudaError if work cannot be captured
  static void between(Context& context, std::function<void()> action);

  /// Of the device, kept for the work; of memory that is shared, what this one added. It stays
  /// until the last that shares it is gone.
  std::size_t memory_bytes() const;

  /// Pieces that one call starts: the parts between actions, without empty ones.
  std::size_t parts() const;

 private:
  struct Part {
    std::unique_ptr<CapturedWork> work;  // null: nothing before the action
    std::function<void()> action;        // after it
  };
  std::shared_ptr<Context> context_;
  std::unique_ptr<CapturedWork> last_;  // after all of the parts; has the memory of all
  std::vector<Part> parts_;
};

}  // namespace tessera
