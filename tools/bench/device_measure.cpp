#include "tools/bench/device_measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

#include "core/base/clock.h"
#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "kernels/elementwise.h"

namespace tessera::kernels {
namespace {

TensorView range(const TensorView& view, std::int64_t begin, std::int64_t count) {
  return dense_view(view.at(begin), view.dtype, {count}, view.device);
}

}  // namespace

DeviceMeasure::DeviceMeasure(std::shared_ptr<Context> context, const DeviceBenchOptions& options)
    : context_(std::move(context)), options_(options) {
  if (!options_.json.empty()) {
    file_.open(options_.json);
    require<IoError>(file_.good(), "{} can't be written", options_.json);
  }
}

TensorView DeviceMeasure::empty(const Shape& shape, DType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(numel(shape)) * dtype_size(dtype);
  storages_.push_back(Storage::allocate(context_, bytes, MemoryCategory::Data, "bench"));
  return dense_view(storages_.back()->data(), dtype, shape, context_->device());
}

TensorView DeviceMeasure::tensor(const Shape& shape, DType dtype) {
  const TensorView view = empty(shape, dtype);
  const std::int64_t count = numel(shape);
  constexpr std::int64_t kFromHost = std::int64_t{1} << 20;
  std::int64_t done = std::min(count, kFromHost);
  std::vector<float> single;
  std::vector<BFloat16> half;
  for (std::int64_t i = 0; i < done; ++i) {
    single.push_back(static_cast<float>(i * 2654435761U % 1000) * 1e-3F - 0.5F);
    half.emplace_back(single.back());
  }
  const void* from = dtype == DType::BF16 ? static_cast<const void*>(half.data()) : single.data();
  copy_from_host(view, from, static_cast<std::size_t>(done) * dtype_size(dtype));
  while (done < count) {  // repeat the copied values
    const std::int64_t part = std::min(done, count - done);
    cast(*context_, range(view, 0, part), {range(view, done, part), false, true});
    done += part;
  }
  return view;
}

TensorView DeviceMeasure::indices(std::int64_t batch, std::int64_t seq, std::int64_t below) {
  std::vector<std::int32_t> values;
  for (std::int64_t i = 0; i < batch * seq; ++i)
    values.push_back(static_cast<std::int32_t>(i * 2654435761U % 4294967291U % below));
  const TensorView view = empty({batch, seq}, DType::I32);
  copy_from_host(view, values.data(), static_cast<std::size_t>(view.bytes()));
  return view;
}

void DeviceMeasure::measure(const std::string& name, Bound bound, double work,
                            const std::function<std::function<void()>()>& prepare) {
  const bool is_roof = name.starts_with("roof");
  if (!is_roof && name.find(options_.only) == std::string::npos) return;
  try {
    time(name, bound, work, prepare());
  } catch (const Error& error) {
    fmt::print("{:<46} left out: {}\n", name, error.what());
    std::fflush(stdout);
    ++left_out_;
  }
  synchronize();
  storages_.clear();
}

void DeviceMeasure::synchronize() {
  if (context_->device().type == DeviceType::CUDA) context_->backend().synchronize();
}

void DeviceMeasure::copy_from_host(const TensorView& to, const void* from, std::size_t bytes) {
  if (context_->device().type == DeviceType::CUDA)
    context_->backend().copy_from_host(to.data, from, bytes);
  else
    std::memcpy(to.data, from, bytes);
}

double DeviceMeasure::seconds(const std::function<void()>& body, int launches) {
  synchronize();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < launches; ++i) body();
  synchronize();
  return seconds_since(start) / launches;
}

void DeviceMeasure::time(const std::string& name, Bound bound, double work,
                         const std::function<void()>& body) {
  constexpr double kSampleSeconds = 5e-3;
  constexpr int kSamples = 15, kMostLaunches = 1000;
  int launches = 1;
  std::clock_t begin = std::clock();
  std::vector<double> samples = {seconds(body, launches)};  // loads the kernel
  if (!options_.quick) {
    const double warm = seconds(body, 3);
    launches = static_cast<int>(
        std::clamp(kSampleSeconds / warm, 1.0, static_cast<double>(kMostLaunches)));
    samples.clear();
    begin = std::clock();
    for (int i = 0; i < kSamples; ++i) samples.push_back(seconds(body, launches));
  }
  const double cpu = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  std::sort(samples.begin(), samples.end());
  report(name, bound, work, samples, cpu / static_cast<double>(samples.size()) / launches);
}

/// Writes each result at once, because a later kernel may crash the program.
void DeviceMeasure::report(const std::string& name, Bound bound, double work,
                           const std::vector<double>& samples, double cpu) {
  const double median = samples[samples.size() / 2], best = samples.front(), worst = samples.back();
  const bool memory = bound == Bound::Memory;
  const double rate = work / median * (memory ? 1e-9 : 1e-12);
  double& roof = roofs_[static_cast<std::size_t>(bound)];
  if (name.starts_with("roof")) roof = rate;
  const double share = roof > 0 ? rate / roof : 0;
  const char* unit = memory ? "GB/s" : "TFLOP/s";
  fmt::print("{:<46} {:>9.4f} {:>9.4f} {:>9.4f} {:>9.4f} {:>10.3f} {:<7} {:>5.0f}%\n", name,
             median * 1e3, best * 1e3, worst * 1e3, cpu * 1e3, rate, unit, 100 * share);
  std::fflush(stdout);
  if (!file_.is_open()) return;
  file_
      << fmt::format(
             R"({{"name": "{}", "ms": {:.5f}, "best_ms": {:.5f}, "worst_ms": {:.5f}, "rate": {:.3f}, )"
             R"("unit": "{}", "share_of_roof": {:.4f}, "work": {:.0f}}})"
             "\n",
             name, median * 1e3, best * 1e3, worst * 1e3, rate, unit, share, work)
      << std::flush;
  require<IoError>(file_.good(), "{} can't be written", options_.json);
}

}  // namespace tessera::kernels
