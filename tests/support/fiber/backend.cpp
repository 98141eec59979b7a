// Backend plugin that runs the CUDA kernels as fibers in host memory. All calls are synchronous.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/base/plugin_kernels.h"
#include "core/base/product_tuning.h"
#include "core/base/system_memory.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/launch.h"
#include "tests/support/fiber/fiber.h"

namespace tessera::kernels::cuda {
bool attention_forward_by_library(Context&, const AttentionForward&) { return false; }
bool attention_backward_by_library(Context&, const AttentionBackward&) { return false; }
}  // namespace tessera::kernels::cuda

namespace tessera::fiber {
namespace {

/// TESSERA_FIBER_MEMORY in bytes; 0: no limit.
std::size_t memory_limit() {
  const char* limit = std::getenv("TESSERA_FIBER_MEMORY");  // NOLINT(concurrency-mt-unsafe)
  return limit == nullptr ? 0 : std::strtoull(limit, nullptr, 10);
}

class LimitedAllocator final : public Allocator {
 public:
  LimitedAllocator() {
    if (memory_limit() > 0) limit_ = memory_limit();
  }
  void* allocate(std::size_t bytes) override {
    require<OutOfMemory>(used_ + bytes <= limit_,
                         "memory of fibers is exhausted: {} requested, {} held",
                         format_bytes(static_cast<std::int64_t>(bytes)),
                         format_bytes(static_cast<std::int64_t>(used_)));
    void* data = memory_->allocate(bytes);
    used_ += bytes;
    return data;
  }
  void deallocate(void* data, std::size_t bytes) noexcept override {
    if (data != nullptr) used_ -= bytes;
    memory_->deallocate(data, bytes);
  }
  std::size_t reserved_bytes() const override { return memory_->reserved_bytes(); }

 private:
  std::unique_ptr<Allocator> memory_ = make_cpu_allocator();
  std::size_t limit_ = std::numeric_limits<std::size_t>::max() / 2;
  std::atomic<std::size_t> used_ = 0;
};

// Synchronizations with the device that the host would have made on a GPU.
std::atomic<std::uint64_t> waits = 0;

class Backend final : public DeviceBackend {
 public:
  explicit Backend(int index) : index_(index) {}

  std::string description() const override { return "fibers on the host"; }
  std::string device_id() const override { return "fibers-" + std::to_string(index_); }
  SystemMemory memory() const override {
    const auto limit = static_cast<std::int64_t>(memory_limit());
    return {limit, limit};
  }
  // Few, so that grid-stride loops take several iterations in small tests.
  DeviceLimits limits() const override { return {2, most_shared_bytes()}; }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return *host_allocator_; }

  bool run_kernel(std::string_view name, Context& context, const void* args) override {
    return kernels_.run(name, context, args);
  }

  ProductTuning& product_tuning() override { return product_tuning_; }

  void copy_from_host(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void copy_to_host(void* to, const void* from, std::size_t bytes) override {
    ++waits;
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void synchronize() override { ++waits; }
  void* stream() override { return nullptr; }
  std::vector<std::string> take_notes() override { return {}; }
  void begin_range(const char*) override { ++open_ranges_; }
  void end_range() override {
    if (--open_ranges_ < 0) throw InternalError("a range ended that had not begun");
  }
  std::size_t mark() override {
    marks_.push_back(std::chrono::steady_clock::now());
    return marks_.size() - 1;
  }
  std::vector<double> take_marks() override {
    std::vector<double> times;
    for (const auto& time : marks_)
      times.push_back(std::chrono::duration<double, std::milli>(time - marks_.front()).count());
    marks_.clear();
    return times;
  }

 private:
  const int index_;
  int open_ranges_ = 0;
  std::vector<std::chrono::steady_clock::time_point> marks_;
  LimitedAllocator allocator_;
  std::unique_ptr<Allocator> host_allocator_ = make_cpu_allocator();
  PluginKernels kernels_;
  ProductTuning product_tuning_{"fibers on the host, version 1"};
};

}  // namespace
}  // namespace tessera::fiber

namespace {

constexpr int kDevices = 8;

}  // namespace

extern "C" {
__attribute__((visibility("default"))) int tessera_plugin_version() {
  return tessera::kPluginVersion;
}
__attribute__((visibility("default"))) std::uint64_t tessera_fiber_waits() {
  return tessera::fiber::waits;
}
__attribute__((visibility("default"))) int tessera_device_count() { return kDevices; }
__attribute__((visibility("default"))) tessera::DeviceBackend* tessera_open_device(int index) {
  tessera::require<tessera::Unsupported>(index >= 0 && index < kDevices,
                                         "there is no cuda:{}; this machine has {} of fibers",
                                         index, kDevices);
  return new tessera::fiber::Backend(index);
}
}
