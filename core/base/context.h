#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/cpu_level.h"
#include "core/base/device.h"
#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "core/base/thread_pool.h"

namespace tessera {

struct ContextOptions {
  Device device{};
  int threads = 1;  ///< of the CPU kernels, the calling thread included
  CpuLevel cpu_level = detect_cpu_level();
  std::string plugin = {};  ///< of a CUDA device; see load_device_backend
};

class Replay;
class Trace;

/// Everything that a rank computes with: device, threads, allocator, memory ledger, gradient mode.
/// Nothing here is process-wide, so eight ranks can run as eight threads of one test. A context is
/// used by one thread at a time; ledger and allocator may be used by several.
class Context : public std::enable_shared_from_this<Context> {
 public:
  /// @throws Unsupported if the machine lacks the device, or the build its backend
  static std::shared_ptr<Context> create(const ContextOptions& options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Device device() const { return options_.device; }
  CpuLevel cpu_level() const { return options_.cpu_level; }
  ThreadPool& threads() { return threads_; }
  MemoryLedger& ledger() { return ledger_; }
  const MemoryLedger& ledger() const { return ledger_; }
  Allocator& allocator() { return backend_ ? backend_->allocator() : *allocator_; }
  /// Of a CUDA context. @throws InternalError on other devices
  DeviceBackend& backend();

  /// Where kernels and ranges are timed; null: nowhere. See Trace.
  Trace* trace() const { return trace_; }
  void set_trace(Trace* trace) { trace_ = trace; }

  /// What captures this context's work just now; null: work runs. See Replay.
  Replay* capture() const { return capture_; }
  void set_capture(Replay* capture) { capture_ = capture; }

  /// Whether operations record what backward needs. Starts as true; see NoGradGuard.
  bool grad_enabled() const { return grad_enabled_; }
  void set_grad_enabled(bool enabled) { grad_enabled_ = enabled; }
  /// Ascending number for a node of the autograd graph.
  std::uint64_t next_sequence() { return sequence_++; }

 private:
  explicit Context(const ContextOptions& options);
  ContextOptions options_;
  MemoryLedger ledger_;
  std::unique_ptr<DeviceBackend> backend_;  // of CUDA; the other devices have an allocator
  std::unique_ptr<Allocator> allocator_;
  ThreadPool threads_;
  bool grad_enabled_ = true;
  std::uint64_t sequence_ = 0;
  Trace* trace_ = nullptr;
  Replay* capture_ = nullptr;
};

/// Sets the gradient mode of a context for a scope.
class GradModeGuard {
 public:
  GradModeGuard(Context& context, bool enabled)
      : context_(context), before_(context.grad_enabled()) {
    context.set_grad_enabled(enabled);
  }
  ~GradModeGuard() { context_.set_grad_enabled(before_); }
  GradModeGuard(const GradModeGuard&) = delete;
  GradModeGuard& operator=(const GradModeGuard&) = delete;

 private:
  Context& context_;
  bool before_;
};

/// Switches recording off for a scope.
class NoGradGuard : public GradModeGuard {
 public:
  explicit NoGradGuard(Context& context) : GradModeGuard(context, false) {}
};

}  // namespace tessera
