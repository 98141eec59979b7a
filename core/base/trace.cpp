#include "core/base/trace.h"

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
  if (context.device().type == DeviceType::CUDA) {
    // Start both clocks at once, while the device is idle.
    context.backend().synchronize();
    context.backend().take_marks();
    context.backend().mark();
  }
  start_ = now_ns();
  context.set_trace(this);
}

Trace::~Trace() { context_.set_trace(nullptr); }

double Trace::now() const { return static_cast<double>(now_ns() - start_) * 1e-3; }

std::size_t Trace::begin(std::string_view name, bool on_device) {
  Span span;
  span.name = name;
  span.on_device = on_device && context_.device().type == DeviceType::CUDA;
  span.begin = span.on_device ? static_cast<double>(context_.backend().mark()) : now();
  spans_.push_back(std::move(span));
  return spans_.size() - 1;
}

void Trace::end(std::size_t span) noexcept {
  Span& s = spans_[span];
  s.end = s.begin;
  try {
    s.end = s.on_device ? static_cast<double>(context_.backend().mark()) : now();
  } catch (const Error&) {  // called by destructors
  }
}

std::string Trace::to_json(int process, const std::string& name) {
  std::vector<double> marks;
  if (context_.device().type == DeviceType::CUDA) {
    marks = context_.backend().take_marks();
    // Stop recording, because later marks would have another time origin.
    context_.set_trace(nullptr);
  }
  const auto place = [&](const Span& span, double value) {
    return span.on_device ? marks.at(static_cast<std::size_t>(value)) * 1e3 : value;
  };
  std::string events = fmt::format(
      R"({{"name":"process_name","ph":"M","pid":{0},"args":{{"name":{1}}}}},)"
      R"({{"name":"thread_name","ph":"M","pid":{0},"tid":0,"args":{{"name":"host"}}}},)"
      R"({{"name":"thread_name","ph":"M","pid":{0},"tid":1,"args":{{"name":"device"}}}})",
      process, quote(name));
  for (const Span& span : spans_) {
    const double begin = place(span, span.begin);
    events += fmt::format(
        ",\n"
        R"({{"name":{},"ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f}}})",
        quote(span.name), process, span.on_device ? 1 : 0, begin, place(span, span.end) - begin);
  }
  return fmt::format("{{\"traceEvents\":[\n{}\n]}}\n", events);
}

Range::Range(Context& context, const std::string& name)
    : context_(context), trace_(context.trace()) {
  if (context.device().type == DeviceType::CUDA) context.backend().begin_range(name.c_str());
  if (trace_ != nullptr) span_ = trace_->begin(name, false);
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
