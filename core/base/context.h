#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/cpu_level.h"
#include "core/base/device.h"

namespace tessera {

struct ContextOptions {
  Device device{};
  int threads = 1;  ///< threads of the CPU kernels, including the calling thread
  CpuLevel cpu_level = detect_cpu_level();
  std::string plugin = {};  ///< path of the CUDA plugin; see load_device_backend
  Device planned{};  ///< meta device: the device whose use of memory it books; see Context::target
  DeviceLimits planned_limits{};  ///< of a planned GPU
};

class Allocator;
class DeviceBackend;
class MemoryLedger;
class Storage;
class ThreadPool;
class Trace;
struct RngStep;
namespace autograd {
class Scope;
}

/// A rank's device, threads, allocator, memory ledger, random numbers and gradient mode. Nothing is
/// process-wide, so that several ranks can run as threads of one process. Used by one thread at a
/// time; ledger and allocator are thread-safe.
class Context : public std::enable_shared_from_this<Context> {
 public:
  /// @throws Unsupported if the machine lacks the device, or the build lacks its backend
  static std::shared_ptr<Context> create(const ContextOptions& options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Device device() const { return options_.device; }
  /// The device, or the one that a meta context plans for: operations choose dtypes, chunks and
  /// scratch memory for it, so that the ledger shows what it will use.
  Device target() const {
    return options_.device.type == DeviceType::Meta ? options_.planned : options_.device;
  }
  CpuLevel cpu_level() const { return options_.cpu_level; }
  ThreadPool& threads();
  MemoryLedger& ledger();
  const MemoryLedger& ledger() const;
  /// Host memory of a context on a GPU; the ledger itself on the CPU.
  MemoryLedger& host_ledger();
  Allocator& allocator();
  /// @throws InternalError unless this is a CUDA context
  DeviceBackend& backend();
  /// Limits of the GPU; on a meta context, of the planned GPU.
  DeviceLimits limits() const;

  /// Records kernels and ranges; null: off.
  Trace* trace() const { return trace_; }
  void set_trace(Trace* trace) { trace_ = trace; }

  /// Sets the random draws of kernels queued from now on. Call it between a backward pass and the
  /// next forward pass.
  void set_rng_step(const RngStep& step);
  /// Device address of the current RngStep, initially zeros; null on the meta device.
  const RngStep* rng_step();

  /// Whether operations are recorded for backward; initially true. See NoGradGuard.
  bool grad_enabled() const { return grad_enabled_; }
  void set_grad_enabled(bool enabled) { grad_enabled_ = enabled; }
  /// Whether backward runs a recomputed function again; see autograd::result().
  bool is_recomputing() const { return recomputing_; }
  void set_recomputing(bool recomputing) { recomputing_ = recomputing; }
  /// Results that backward computes again, listed by autograd::recompute_if_cheap(); null: none are.
  std::vector<std::weak_ptr<Storage>>* cheap_results() const { return cheap_results_; }
  void set_cheap_results(std::vector<std::weak_ptr<Storage>>* list) { cheap_results_ = list; }
  /// The scope that recorded operations belong to; see autograd::Scope.
  const std::shared_ptr<autograd::Scope>& scope() const { return scope_; }
  void set_scope(std::shared_ptr<autograd::Scope> scope) { scope_ = std::move(scope); }
  /// Floating-point operations of matrix products and attention on a meta context, so far.
  double planned_flops() const { return planned_flops_; }
  void plan_flops(double count) { planned_flops_ += count; }
  /// Most scratch memory that each library may use for an operation on a planned GPU, beside the
  /// ledger: a library chooses it on the GPU.
  const std::unordered_map<std::string, std::int64_t>& planned_libraries() const;
  void plan_library(const std::string& name, std::int64_t bytes);

  /// Whether kernels repeat their results to the bit; initially true. False allows faster ones, whose sums have no
  /// fixed order: on CUDA, cuDNN's gradient of attention.
  bool deterministic() const { return deterministic_; }
  void set_deterministic(bool deterministic) { deterministic_ = deterministic; }

  /// Sequence number for a node of the autograd graph.
  std::uint64_t next_sequence() { return sequence_++; }

 private:
  explicit Context(const ContextOptions& options);
  ContextOptions options_;
  struct Resources;
  std::shared_ptr<Resources> resources_;  // not shared: std::unique_ptr takes longer to compile
  bool grad_enabled_ = true;
  bool recomputing_ = false;
  std::vector<std::weak_ptr<Storage>>* cheap_results_ = nullptr;
  bool deterministic_ = true;
  std::shared_ptr<autograd::Scope> scope_;
  std::uint64_t sequence_ = 0;
  double planned_flops_ = 0;
  Trace* trace_ = nullptr;
  RngStep* rng_step_ = nullptr;  // allocated on first use
};

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

class NoGradGuard : public GradModeGuard {
 public:
  explicit NoGradGuard(Context& context) : GradModeGuard(context, false) {}
};

}  // namespace tessera
