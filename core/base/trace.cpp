#include "core/base/trace.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "core/base/memory.h"

namespace tessera {
namespace {

std::int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string quote(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result + '"';
}

}  // namespace

Trace::Trace(Context& context) : context_(context) {
  require(context.trace() == nullptr, "a context has one trace at a time");
  if (is_on_gpu()) {
    // Start both clocks at once, while the device is idle.
    context.backend().synchronize();
    context.backend().take_marks();
    context.backend().mark();
  }
  start_ = now_ns();
  context.set_trace(this);
}

Trace::Trace(Context& context, const KernelRates& rates) : Trace(context) { rates_ = &rates; }

Trace::~Trace() { context_.set_trace(nullptr); }

double Trace::now() const {
  if (rates_ != nullptr) return clock_;
  return static_cast<double>(now_ns() - start_) * 1e-3;
}

std::size_t Trace::begin(std::string_view name) {
  spans_.push_back({.name = std::string(name), .begin = now()});
  return spans_.size() - 1;
}

std::size_t Trace::begin_kernel(std::string_view name, const KernelWork& work) {
  spans_.push_back({.name = std::string(name),
                    .begin = is_on_gpu() ? static_cast<double>(context_.backend().mark()) : now(),
                    .track = is_on_gpu() ? Track::Device : Track::Host,
                    .is_kernel = true,
                    .work = work,
                    .step = step_});
  return spans_.size() - 1;
}

void Trace::end(std::size_t span) noexcept {
  Span& s = spans_[span];
  s.end = s.begin;
  if (rates_ != nullptr && s.is_kernel) clock_ = s.begin + rates_->seconds(s.name, s.work) * 1e6;
  try {
    s.end = s.track == Track::Device ? static_cast<double>(context_.backend().mark()) : now();
  } catch (const Error&) {  // called by destructors
  }
}

void Trace::wait_until(double seconds) {
  const double wait = std::max(0.0, seconds * 1e6 - clock_);
  clock_ += wait;
  waited_ += wait;
}

void Trace::add_collective(std::string_view name, double begin_seconds, double end_seconds) {
  spans_.push_back({.name = std::string(name),
                    .begin = begin_seconds * 1e6,
                    .end = end_seconds * 1e6,
                    .track = Track::Network});
}

std::vector<KernelTime> Trace::planned_kernels() const {
  std::vector<KernelTime> kernels;
  for (const Span& span : spans_)
    if (span.is_kernel) kernels.push_back({span.name, span.work, (span.end - span.begin) * 1e-6});
  return kernels;
}

std::string Trace::to_json(int process, const std::string& name,
                           const std::map<std::string, std::string>& about) {
  std::vector<double> marks;
  if (is_on_gpu()) {
    marks = context_.backend().take_marks();
    // Stop recording, because later marks would have another time origin.
    context_.set_trace(nullptr);
  }
  const auto place = [&](const Span& span, double value) {
    return span.track == Track::Device ? marks.at(static_cast<std::size_t>(value)) * 1e3 : value;
  };
  std::string events = fmt::format(
      R"({{"name":"process_name","ph":"M","pid":{},"args":{{"name":{}}}}})", process, quote(name));
  constexpr std::array kTracks = {"host", "device", "network"};
  for (std::size_t track = 0; track < kTracks.size(); ++track)
    if (std::ranges::any_of(
            spans_, [&](const Span& s) { return static_cast<std::size_t>(s.track) == track; }))
      events += fmt::format(
          R"(,{{"name":"thread_name","ph":"M","pid":{},"tid":{},"args":{{"name":"{}"}}}})", process,
          track, kTracks[track]);
  for (const Span& span : spans_) {
    const double begin = place(span, span.begin);
    events += fmt::format(
        ",\n"
        R"({{"name":{},"ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f})",
        quote(span.name), process, static_cast<int>(span.track), begin,
        place(span, span.end) - begin);
    if (span.is_kernel)
      events += fmt::format(R"(,"args":{{"read":{:.0f},"written":{:.0f},"flops":{:.0f}{}}})",
                            span.work.read, span.work.written, span.work.flops,
                            span.step < 0 ? "" : fmt::format(R"(,"step":{})", span.step));
    events += '}';
  }
  std::string other;
  for (const auto& [key, value] : about)
    other += fmt::format("{}{}:{}", other.empty() ? "" : ",", quote(key), quote(value));
  return fmt::format("{{\"traceEvents\":[\n{}\n],\n\"otherData\":{{{}}}}}\n", events, other);
}

Range::Range(Context& context, const std::string& name)
    : context_(context), trace_(context.trace()) {
  if (context.device().type == DeviceType::CUDA) context.backend().begin_range(name.c_str());
  if (trace_ != nullptr) span_ = trace_->begin(name);
  if (!context.ledger().records_peak()) return;
  outer_ = context.ledger().phase();
  context.ledger().set_phase(name);
}

Range::~Range() {
  if (context_.ledger().records_peak()) context_.ledger().set_phase(outer_);
  if (trace_ != nullptr && context_.trace() == trace_) trace_->end(span_);
  if (context_.device().type == DeviceType::CUDA) context_.backend().end_range();
}

}  // namespace tessera
