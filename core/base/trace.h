#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/context.h"

namespace tessera {

/// Records kernels and Ranges of one context as a Chrome trace (chrome://tracing, Perfetto) for as
/// long as it lives.
///
/// On a GPU, ranges are timed on the host, which runs ahead, and kernels on the device, at the cost
/// of two timestamps each.
class Trace {
 public:
  explicit Trace(Context& context);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// The events so far as JSON: an object with "traceEvents". Waits for the device.
  /// @param process, name  number and name of the process in the trace, such as the rank
  std::string to_json(int process, const std::string& name);

 private:
  friend class Range;
  friend class KernelRange;
  struct Span {
    std::string name;
    double begin = 0, end = 0;  ///< microseconds since start_, or indices of device timestamps
    bool on_device = false;
  };
  std::size_t begin(std::string_view name, bool on_device);
  /// After a device failure, which is reported elsewhere, the span gets no length.
  void end(std::size_t span) noexcept;
  double now() const;

  Context& context_;
  std::int64_t start_ = 0;  // nanoseconds of the steady clock
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

class KernelRange {
 public:
  KernelRange(Context& context, const char* name) : trace_(context.trace()) {
    if (trace_ != nullptr) [[unlikely]]
      span_ = trace_->begin(name, true);
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
