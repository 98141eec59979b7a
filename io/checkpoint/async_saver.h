#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "core/base/context.h"
#include "io/checkpoint/save.h"

namespace tessera::io {

struct FinishedSave {
  std::int64_t step = 0;
  SaveReport report;         ///< valid if error is null
  std::exception_ptr error;  ///< thrown by the writer
  double stall_seconds = 0;  ///< time spent in start() and wait_copied()
  double seconds = 0;        ///< from start() to the end of the write
};

/// Saves in the background: copies the parts to a staging buffer in host memory, from which a
/// writer thread writes the checkpoint. One save is in flight at a time.
///
/// The staging buffer is allocated once and reused; for a GPU context it comes from the backend's
/// host_allocator(). The context's memory ledger lists it under Staging.
///
/// Call from the context's thread only. The writer thread receives no signals.
class AsyncSaver {
 public:
  /// Staging bytes needed by a save of this request.
  static std::size_t staging_bytes(const SaveRequest& request);

  /// @param bytes     size of the staging buffer
  /// @param patience  longest wait of the destructor for a save in flight
  /// @throws OutOfMemory with the ledger
  AsyncSaver(std::shared_ptr<Context> context, std::size_t bytes,
             std::chrono::milliseconds patience);
  /// Finishes pending copies and waits up to `patience` for a save in flight. If the save goes on,
  /// detaches its thread, so that a hung system call does not keep the process from exiting.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// Writes a checkpoint from parts in the staging buffer: calls save_checkpoint(), and may do
  /// work before and after. Runs on the writer thread, possibly after this object is destroyed, so
  /// it must own its captures.
  using Write = std::function<SaveReport(const SaveRequest& staged)>;

  /// Starts a save of parts in the memory of the context's device. Host parts are copied in the
  /// background and must stay unchanged until wait_copied() or the destructor returns; GPU parts
  /// are copied before this returns.
  /// @throws InternalError if a save is in flight, or the last outcome was not taken;
  ///         InvalidArgument if the staging buffer is too small; errors of the device
  void start(SaveRequest request, Write write);

  /// Helps to copy the parts of the save in flight, if any, and returns once all are copied.
  void wait_copied();

  /// Whether a save is in flight.
  bool busy() const { return !wait_until({}); }
  /// Waits until no save is in flight. @return false at the deadline
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;
  /// Returns the outcome of the last save once; empty while it is in flight.
  std::optional<FinishedSave> take();

  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

 private:
  struct State;
  const std::shared_ptr<Context> context_;
  const std::shared_ptr<State> state_;
  std::chrono::milliseconds patience_;
};

}  // namespace tessera::io
