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

/// How a save in the background ended.
struct FinishedSave {
  std::int64_t step = 0;
  SaveReport report;         ///< if there is no error
  std::exception_ptr error;  ///< what the writer threw
  double stall_seconds = 0;  ///< that start() and wait_copied() took
  double seconds = 0;        ///< from start() to the end of the writer
};

/// Saves while its caller goes on: what is to be saved is copied into memory of the host, and one
/// writer thread does the rest. One save is in flight at a time.
///
/// The staging is allocated once, touched, and reused; of a device's context it comes from the
/// backend's host_allocator(). It is booked in the context's ledger as Staging.
///
/// For one thread, the context's; only the writer runs on another. It gets no signals.
class AsyncSaver {
 public:
  /// Bytes of staging that a save of this request takes.
  static std::size_t staging_bytes(const SaveRequest& request);

  /// @param bytes     of staging
  /// @param patience  how long the destructor waits for a save in flight
  /// @throws OutOfMemory with the ledger
  AsyncSaver(std::shared_ptr<Context> context, std::size_t bytes,
             std::chrono::milliseconds patience);
  /// Waits for a save in flight, but no longer than the patience: a writer that hangs in a system
  /// call is left behind with all that it uses, and the process can end. What is still to be copied
  /// is copied first.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// What the writer does with a request whose parts lie in staging: save_checkpoint() and what
  /// belongs before and after it. Runs on the writer's thread, maybe after this object is gone, so
  /// it owns what it uses.
  using Write = std::function<SaveReport(const SaveRequest& staged)>;

  /// Returns while the writer copies the parts, whose data are in the memory of the context's
  /// device, and writes. The parts must stay, and not change, until wait_copied() has
  /// returned or this object is gone; what is on a GPU is copied here.
  /// @throws InternalError if a save is in flight, or its outcome was not taken; InvalidArgument if
  ///         the staging is too small; errors of the device
  void start(SaveRequest request, Write write);

  /// Waits until the parts of the save in flight, if there is one, are copied, and helps with it.
  void wait_copied();

  /// Whether a save is in flight.
  bool busy() const;
  /// Waits until none is. @return false: there still is one
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;
  /// How the last save ended; once, and not while it is in flight.
  std::optional<FinishedSave> take();

  /// From now on the destructor waits no longer than this.
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

 private:
  struct State;
  const std::shared_ptr<Context> context_;
  const std::shared_ptr<State> state_;
  std::chrono::milliseconds patience_;
};

}  // namespace tessera::io
