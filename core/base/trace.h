#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/context.h"

namespace tessera {

/// Times of kernels and ranges of one context, as a Chrome trace (chrome://tracing, Perfetto).
///
/// While it lives, the context's kernels and Ranges are recorded: on the CPU by the clock; on a GPU
/// ranges by the clock of the host, which runs ahead, and kernels by the order of the device's
/// work. Costs two marks of the device per kernel, and nothing where no Trace is.
class Trace {
 public:
  explicit Trace(Context& context);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// The events so far as JSON: an object with "traceEvents". Waits for the device.
  /// @param process  number and name of the process in the picture: the rank
  std::string to_json(int process, const std::string& name);

 private:
  friend class Range;
  friend class KernelRange;
  struct Span {
    std::string name;
    double begin = 0, end = 0;  ///< microseconds since the trace began, or numbers of marks
    bool on_device = false;
  };
  std::size_t begin(std::string_view name, bool on_device);
  /// After a failure of the device, which somebody else reports, the span ends where it began.
  void end(std::size_t span) noexcept;
  double now() const;

  Context& context_;
  std::chrono::steady_clock::time_point start_;
  std::vector<Span> spans_;
};

/// A named part of a step, such as "forward h.3", for profilers and the context's trace.
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
};

/// A kernel, for the context's trace alone.
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
