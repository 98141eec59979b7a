#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/base/context.h"
#include "core/base/device_backend.h"
#include "core/base/rng.h"
#include "core/base/storage.h"
#include "core/base/tensor_view.h"
#include "kernels/dispatch.h"
#include "tests/support/paths.h"

// Shared by all kernel tests: backends, buffers of any compute dtype, and one tolerance table.
namespace tessera::test {

using kernels::accumulator_dtype;

inline constexpr DType kComputingDTypes[] = {DType::F64, DType::F32, DType::BF16};
inline constexpr std::int64_t kOddSizes[] = {1, 3, 31, 33, 257};
/// The same, and GPT-2's vocabulary: tensor lengths or row widths.
inline constexpr std::int64_t kOddLengths[] = {1, 3, 31, 33, 257, 50257};

/// Allowed relative rounding error of one result (bf16: half a unit in the last place).
///
/// Kernels are tested with all of kOddLengths on every backend, except
/// - products, which a library computes on a GPU and a naive loop on fibers: up to 257;
/// - attention, whose cost is quadratic in T: T up to 257, head_dim up to 256, CUDA's limit;
/// - rotary: up to its 256 pairs per head, 50257 per token;
/// - the embedding: width up to 264, vocabulary up to 65600.
inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::F64:
      return 1e-14;
    case DType::F32:
      return 1e-6;
    default:
      return 4e-3;
  }
}

/// Calls f(Context&) for every supported CPU level with 1, 2 and 3 threads.
template <typename F>
void for_each_cpu_context(F&& f) {
  for (const CpuLevel level : cpu_levels()) {
    for (const int threads : {1, 2, 3}) {
      const std::string where = std::string(cpu_level_name(level));
      CAPTURE(where);
      CAPTURE(threads);
      const auto context = Context::create({.threads = threads, .cpu_level = level});
      f(*context);
    }
  }
}

/// Device of new Buffers on this thread; null: the host.
inline std::shared_ptr<Context>& buffer_context() {
  thread_local std::shared_ptr<Context> context;
  return context;
}

/// Calls f(Context&) with the plugin's CUDA kernels, and with Buffers in its memory.
template <typename F>
void with_plugin(const std::string& plugin, F&& f) {
  CAPTURE(plugin);
  const auto context = Context::create({.device = {DeviceType::CUDA, 0}, .plugin = plugin});
  buffer_context() = context;
  try {
    f(*context);
  } catch (...) {
    buffer_context() = nullptr;
    throw;
  }
  buffer_context() = nullptr;
}

/// Path of the GPU backend under test, TESSERA_TEST_CUDA_PLUGIN; empty: none.
inline std::string gpu_plugin() {
  const char* plugin = std::getenv("TESSERA_TEST_CUDA_PLUGIN");  // NOLINT(concurrency-mt-unsafe)
  return plugin == nullptr ? "" : plugin;
}

/// TESSERA_TEST_CUDA_ONLY: skip CPU and fibers, for tools that slow a GPU down.
inline bool gpu_only() {
  return !gpu_plugin().empty() &&
         std::getenv("TESSERA_TEST_CUDA_ONLY") != nullptr;  // NOLINT(concurrency-mt-unsafe)
}

/// Calls f(Context&) on the GPU of TESSERA_TEST_CUDA_PLUGIN, if set.
template <typename F>
void for_gpu_context(F&& f) {
  if (const std::string plugin = gpu_plugin(); !plugin.empty()) with_plugin(plugin, f);
}

/// Calls f(Context&) with the CUDA kernels on fibers and on the GPU, if any.
template <typename F>
void for_each_cuda_context(F&& f) {
  if (!gpu_only()) with_plugin(fiber_plugin(), f);
  for_gpu_context(f);
}

template <typename F>
void for_each_context(F&& f) {
  if (!gpu_only()) for_each_cpu_context(f);
  for_each_cuda_context(f);
}

template <typename F>
void for_each_context_and_dtype(F&& f) {
  for_each_context([&](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      CAPTURE(dtype_name(dtype));
      f(context, dtype);
    }
  });
}

/// Checks that run(Context&) returns the same bytes for any number of threads.
template <typename F>
void check_same_for_any_threads(F&& run) {
  const auto once = run(*Context::create({.threads = 1}));
  for (const int threads : {2, 3}) CHECK(run(*Context::create({.threads = threads})) == once);
}

/// A dense tensor in host memory or on buffer_context(). Values are converted from and to double.
class Buffer {
 public:
  Buffer(DType dtype, const Shape& shape, double value = 0.0)
      : bytes_(static_cast<std::size_t>(numel(shape)) * dtype_size(dtype)),
        context_(buffer_context()),
        view_(dense_view(bytes_.data(), dtype, shape)),
        host_(view_) {
    if (context_) {
      storage_ = Storage::allocate(context_, bytes_.size(), MemoryCategory::Data, "test");
      view_.data = storage_->data();
      view_.device = context_->device();
    }
    if (is_floating(dtype)) set(std::vector<double>(static_cast<std::size_t>(numel(shape)), value));
  }
  Buffer(DType dtype, const Shape& shape, const std::vector<double>& values)
      : Buffer(dtype, shape) {
    set(values);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  /// Normal random numbers with standard deviation `scale` and mean `offset`.
  static std::vector<double> normal(std::int64_t n, std::uint64_t seed, double scale = 1.0,
                                    double offset = 0.0) {
    const RngKey key = RngKey::make(seed, RngPurpose::Test, 0);
    std::vector<double> values;
    for (std::int64_t i = 0; i < n; ++i)
      values.push_back(scale * static_cast<double>(normal_at(key, static_cast<std::uint64_t>(i))) +
                       offset);
    return values;
  }

  const TensorView& view() const { return view_; }
  GradientView gradient(bool accumulate) const { return {view_, accumulate, true}; }
  const std::vector<char>& bytes() const {
    if (context_) context_->backend().copy_to_host(bytes_.data(), view_.data, bytes_.size());
    return bytes_;
  }

  void set(const std::vector<double>& values) {
    REQUIRE(static_cast<std::int64_t>(values.size()) == view_.numel());
    visit_floating(view_.dtype, "test", [&]<typename T>(std::type_identity<T>) {
      for (std::size_t i = 0; i < values.size(); ++i)
        host_.as<T>()[i] = T(static_cast<Accumulator<T>>(values[i]));
    });
    set_bytes(bytes_.data(), bytes_.size());
  }
  void set_bytes(const void* from, std::size_t size) const {
    REQUIRE(size == bytes_.size());
    if (size != 0) std::memmove(bytes_.data(), from, size);
    if (context_) context_->backend().copy_from_host(view_.data, bytes_.data(), size);
  }
  std::vector<double> values() const {
    bytes();
    std::vector<double> result;
    visit_floating(view_.dtype, "test", [&]<typename T>(std::type_identity<T>) {
      for (std::int64_t i = 0; i < view_.numel(); ++i)
        result.push_back(static_cast<double>(static_cast<Accumulator<T>>(host_.as<T>()[i])));
    });
    return result;
  }

 private:
  mutable std::vector<char> bytes_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<Storage> storage_;
  TensorView view_, host_;
};

/// A dense i32 tensor, e.g. tokens, in host memory or on buffer_context().
class IndexBuffer {
 public:
  IndexBuffer(const Shape& shape, std::vector<std::int32_t> values)
      : values_(std::move(values)), view_(dense_view(values_.data(), DType::I32, shape)) {
    REQUIRE(static_cast<std::int64_t>(values_.size()) == view_.numel());
    const auto& context = buffer_context();
    if (!context) return;
    storage_ = Storage::allocate(context, view_.bytes(), MemoryCategory::Data, "test");
    context->backend().copy_from_host(storage_->data(), view_.data, view_.bytes());
    view_.data = storage_->data();
    view_.device = context->device();
  }
  IndexBuffer(const IndexBuffer&) = delete;
  IndexBuffer& operator=(const IndexBuffer&) = delete;

  const TensorView& view() const { return view_; }

 private:
  std::vector<std::int32_t> values_;
  std::shared_ptr<Storage> storage_;
  TensorView view_;
};

inline std::vector<double> rounded(DType dtype, const std::vector<double>& values) {
  return Buffer(dtype, {static_cast<std::int64_t>(values.size())}, values).values();
}

/// The view moved by `elements`.
inline TensorView offset(TensorView view, std::int64_t elements) {
  view.data =
      static_cast<char*>(view.data) + static_cast<std::size_t>(elements) * dtype_size(view.dtype);
  return view;
}

/// Whether attention on the CPU rounds the weights of bf16 values to bf16 (kernels/attention.h).
inline bool rounds_weights([[maybe_unused]] const Context& context,
                           [[maybe_unused]] std::int64_t queries) {
#if defined(__x86_64__)
  return context.device().type == DeviceType::CPU && context.cpu_level() == CpuLevel::V4 &&
         __builtin_cpu_supports("avx512bf16") != 0 && queries > 4;
#else
  return false;
#endif
}

/// Checks |got - want| <= relative * (|want| + magnitude) for every element; reports the worst one.
/// @param magnitude  size of the terms that a result is summed from
inline void check_close(const std::vector<double>& got, const std::vector<double>& want,
                        double relative, double magnitude = 0.0) {
  REQUIRE(got.size() == want.size());
  double worst = 0.0;
  std::size_t place = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double allowed = relative * (std::abs(want[i]) + magnitude);
    const double error = std::abs(got[i] - want[i]);
    const double ratio = error == 0.0 ? 0.0 : error / allowed;
    if (!(ratio <= worst)) {  // also true for a NaN
      worst = ratio;
      place = i;
    }
    if (std::isnan(ratio)) break;
  }
  CAPTURE(place);
  const double got_value = got.empty() ? 0.0 : got[place];
  const double want_value = want.empty() ? 0.0 : want[place];
  CAPTURE(got_value);
  CAPTURE(want_value);
  CHECK(worst <= 1.0);
}

}  // namespace tessera::test
