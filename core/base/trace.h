#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/context.h"
#include "core/base/kernel_rates.h"
#include "core/base/kernel_work.h"

namespace tessera {

/// Records kernels and Ranges of one context as a Chrome trace (chrome://tracing, Perfetto) for as
/// long as it lives.
///
/// On a GPU, ranges are timed on the host, which runs ahead, and kernels on the device, at the cost
/// of two timestamps each. On a meta context, kernels take the time that `rates` say, and collectives of a
/// planned communicator the time that its links need.
class Trace {
 public:
  explicit Trace(Context& context);
  /// @param rates  must outlive the trace
  Trace(Context& context, const KernelRates& rates);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// The events so far as JSON: an object with "traceEvents". Waits for the device. Events of kernels have
  /// args: bytes "read" and "written", "flops" and, within a TracedStep, its number "step".
  /// @param process, name  number and name of the process in the trace, such as the rank
  /// @param about          "otherData" of the trace: what was run
  std::string to_json(int process, const std::string& name,
                      const std::map<std::string, std::string>& about = {});

  // The next functions are for a trace of a meta context, with rates.

  /// Seconds since the start.
  double planned_now() const { return clock_ * 1e-6; }
  /// Kernels from now on start at `seconds` or later.
  void wait_until(double seconds);
  /// Records a collective.
  void add_collective(std::string_view name, double begin_seconds, double end_seconds);
  /// The kernels so far, with their times.
  std::vector<KernelTime> planned_kernels() const;
  /// Seconds for which kernels waited for collectives.
  double planned_waits() const { return waited_ * 1e-6; }

 private:
  friend class Range;
  friend class KernelRange;
  friend class TracedStep;
  enum class Track : std::uint8_t { Host, Device, Network };
  struct Span {
    std::string name;
    double begin = 0, end = 0;  ///< microseconds since start_, or indices of device timestamps
    Track track = Track::Host;
    bool is_kernel = false;
    KernelWork work{};
    std::int64_t step = -1;  ///< -1: of no step
  };
  std::size_t begin(std::string_view name);
  std::size_t begin_kernel(std::string_view name, const KernelWork& work);
  /// After a device failure, which is reported elsewhere, the span gets no length.
  void end(std::size_t span) noexcept;
  /// Forgets the last span.
  void drop(std::size_t span) { spans_.resize(span); }
  double now() const;
  bool is_on_gpu() const { return context_.device().type == DeviceType::CUDA; }

  Context& context_;
  const KernelRates* rates_ = nullptr;
  std::int64_t start_ = 0;  // nanoseconds of the steady clock
  double clock_ = 0;        // microseconds, of a meta context
  double waited_ = 0;
  std::int64_t step_ = -1;
  std::vector<Span> spans_;
};

/// A named part of a step, such as "forward h.3", for profilers, the context's trace, and the memory
/// ledger's peak.
class Range {
 public:
  Range(Context& context, const std::string& name);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  Context& context_;
  Trace* trace_;
  std::size_t span_ = 0;
  std::string outer_;  // name of the phase around this one, if the ledger records its peak
};

/// A training step, for the kernels of the context's trace.
class TracedStep {
 public:
  TracedStep(Context& context, std::int64_t number) : trace_(context.trace()) {
    if (trace_ != nullptr) trace_->step_ = number;
  }
  ~TracedStep() {
    if (trace_ != nullptr) trace_->step_ = -1;
  }
  TracedStep(const TracedStep&) = delete;
  TracedStep& operator=(const TracedStep&) = delete;

 private:
  Trace* trace_;
};

/// A kernel, for the context's trace, and for the operations that a meta context counts.
class KernelRange {
 public:
  /// @param work  function that returns the KernelWork
  template <typename Work>
  KernelRange(Context& context, const char* name, const Work& work) : trace_(context.trace()) {
    if (trace_ == nullptr && context.device().type != DeviceType::Meta) [[likely]]
      return;
    const KernelWork done = work();
    if (context.device().type == DeviceType::Meta) context.plan_flops(done.flops);
    if (trace_ != nullptr) span_ = trace_->begin_kernel(name, done);
  }
  /// The kernel did not run after all.
  void drop() {
    if (trace_ != nullptr) trace_->drop(span_);
    trace_ = nullptr;
  }
  ~KernelRange() {
    if (trace_ != nullptr) [[unlikely]]
      trace_->end(span_);
  }
  KernelRange(const KernelRange&) = delete;
  KernelRange& operator=(const KernelRange&) = delete;

 private:
  Trace* trace_;
  std::size_t span_ = 0;
};

}  // namespace tessera
