// The CUDA backend's host code against a fake runtime: unsuitable GPUs, failing calls, and stream
// order.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "core/base/context.h"
#include "core/base/cuda/backend.h"
#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "core/base/memory.h"
#include "tests/support/check_throws.h"
#include "tests/support/cuda_runtime/fake_gpu.h"
// Must come after fake_gpu.h:
#include "kernels/cuda/launch.h"

extern "C" int tessera_device_count();

namespace tessera::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// A new fake GPU per case, with a check for leaks.
struct Fixture {
  Fixture() {
    fake_gpu() = {};
    cudaGetLastError();
  }
  ~Fixture() {
    for (const auto& kind : fake_gpu().alive) {
      CAPTURE(kind.first);
      CHECK(kind.second == 0);
    }
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;

  FakeGpu& gpu = fake_gpu();
};

std::vector<std::byte> bytes_of(std::size_t count, unsigned seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * 7 + seed) % 251);
  return bytes;
}

void kernel(int) {}

}  // namespace

TEST_CASE_FIXTURE(Fixture, "an unusable GPU is reported with the reason") {
  SUBCASE("no driver") {
    gpu.driver = cudaErrorInsufficientDriver;
    gpu.driver_version = 0;
    CHECK_THROWS_HOLDING(Unsupported, "no GPU can be used: no NVIDIA driver is installed",
                         cuda::CudaBackend(0));
    CHECK_THROWS_HOLDING(Unsupported, "no NVIDIA driver", tessera_device_count());
  }
  SUBCASE("an old driver") {
    gpu.driver = cudaErrorInsufficientDriver;
    CHECK_THROWS_HOLDING(Unsupported,
                         "no GPU can be used: CUDA driver version is insufficient for CUDA runtime",
                         cuda::CudaBackend(0));
  }
  SUBCASE("a driver without a GPU") {
    gpu.count = 0;
    CHECK_THROWS_HOLDING(Unsupported, "no GPU can be used: the driver shows none",
                         cuda::CudaBackend(0));
  }
  SUBCASE("fewer GPUs than requested") {
    CHECK_THROWS_HOLDING(Unsupported, "there is no cuda:3; this machine has 1 GPU",
                         cuda::CudaBackend(3));
    CHECK(tessera_device_count() == 1);
  }
  SUBCASE("a GPU that is too old") {
    gpu.name = "Tesla T4";
    gpu.major = 7;
    gpu.minor = 5;
    CHECK_THROWS_HOLDING(Unsupported,
                         "cuda:0 (Tesla T4) has compute capability 7.5; tessera needs 8.0 or newer",
                         cuda::CudaBackend(0));
  }
  SUBCASE("a GPU without stream-ordered allocation") {
    gpu.has_pools = false;
    CHECK_THROWS_HOLDING(Unsupported, "cuda:0 (Fake H100) has no memory pools",
                         cuda::CudaBackend(0));
  }
  SUBCASE("cuBLAS does not start") {
    gpu.fails["cublasLtCreate"] = {cudaErrorInitializationError};
    CHECK_THROWS_HOLDING(CudaError, "cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED",
                         cuda::CudaBackend(0));
  }
  SUBCASE("host memory cannot be pinned") {
    gpu.fails["cudaMallocHost"] = {cudaSuccess, cudaErrorMemoryAllocation};
    CHECK_THROWS_HOLDING(OutOfMemory, "cudaMallocHost", cuda::CudaBackend(0));
  }
}

TEST_CASE_FIXTURE(Fixture, "a GPU is described by name, PCI id and memory") {
  const cuda::CudaBackend backend(0);
  CHECK(backend.description() == "Fake H100, compute capability 9.0, 1.00 GiB");
  CHECK(backend.device_id() == "0000:41:00");
  CHECK(backend.memory().total == std::int64_t{1} << 30);
}

TEST_CASE_FIXTURE(Fixture, "devices of one process access each other's memory where they can") {
  gpu.count = 3;
  gpu.peers = {{0, 1}, {1, 0}};
  const cuda::CudaBackend first(0), same(0);
  CHECK(gpu.access.empty());
  const cuda::CudaBackend third(2);
  { const cuda::CudaBackend second(1); }
  CHECK(gpu.access == gpu.peers);
  gpu.calls.clear();
  const cuda::CudaBackend again(1);
  CHECK(gpu.calls["cudaMemPoolSetAccess"] == 4);  // with each pool of cuda:0
}

TEST_CASE_FIXTURE(Fixture, "out of memory: cached memory is released first") {
  cuda::CudaBackend backend(0);
  Allocator& allocator = backend.allocator();
  void* const first = allocator.allocate(600 * kMiB);
  allocator.deallocate(first, 600 * kMiB);
  CHECK(allocator.reserved_bytes() == 600 * kMiB);
  gpu.fails["cudaMallocFromPoolAsync"] = {cudaErrorMemoryAllocation};  // simulates fragmentation
  void* const second = allocator.allocate(500 * kMiB);
  CHECK(gpu.calls["cudaMemPoolTrimTo"] == 1);
  CHECK(allocator.reserved_bytes() == 500 * kMiB);

  // Nothing is cached: the error states the sizes, and smaller requests still succeed.
  CHECK_THROWS_HOLDING(
      OutOfMemory,
      "memory of cuda:0 is exhausted: 600.0 MiB requested, 500.0 MiB held (the device "
      "has 524.0 MiB free of 1.00 GiB; other processes may hold the rest)",
      allocator.allocate(600 * kMiB));
  CHECK(cudaGetLastError() == cudaSuccess);
  void* const third = allocator.allocate(100 * kMiB);
  allocator.deallocate(second, 500 * kMiB);
  allocator.deallocate(third, 100 * kMiB);

  Allocator& pinned = backend.host_allocator();
  gpu.fails["cudaMallocHost"] = {cudaErrorMemoryAllocation, cudaErrorMemoryAllocation};
  CHECK_THROWS_HOLDING(OutOfMemory, "pinned host memory", pinned.allocate(kMiB));
  gpu.fails.clear();
  pinned.deallocate(pinned.allocate(kMiB), kMiB);
}

TEST_CASE_FIXTURE(Fixture,
                  "asynchronous copies are ordered, and snapshot their source at the call") {
  // More copies than staging buffers, each larger than one.
  cuda::CudaBackend backend(0);
  const std::size_t size = 9 * kMiB + 5;
  void* const device = backend.allocator().allocate(size);
  std::vector<std::byte> source;
  for (unsigned round = 0; round < 20; ++round) {
    source = bytes_of(size, round);
    backend.copy_from_host(device, source.data(), size);
    std::fill(source.begin(), source.end(), std::byte{0});  // may be reused at once
  }
  std::vector<std::byte> back(size);
  backend.copy_to_host(back.data(), device, size);
  CHECK(back == bytes_of(size, 19));

  // Freed while the stream still has to read it.
  source = bytes_of(size, 3);
  backend.copy_from_host(device, source.data(), size);
  void* const other = backend.allocator().allocate(size);
  cudaMemcpyAsync(other, device, size, cudaMemcpyDeviceToDevice,
                  static_cast<cudaStream_t>(backend.stream()));
  backend.allocator().deallocate(device, size);
  void* const again = backend.allocator().allocate(size);
  backend.copy_from_host(again, back.data(), size);
  backend.copy_to_host(back.data(), other, size);
  CHECK(back == source);
  backend.allocator().deallocate(other, size);
  backend.allocator().deallocate(again, size);
}

TEST_CASE_FIXTURE(Fixture, "a failed kernel is reported by the next wait, and by name") {
  cuda::CudaBackend backend(0);
  gpu.fails["cudaStreamSynchronize"] = {cudaErrorLaunchFailure};
  CHECK_THROWS_HOLDING(CudaError,
                       "cudaStreamSynchronize: unspecified launch failure (cudaErrorLaunchFailure)",
                       backend.synchronize());
  CHECK(cudaGetLastError() == cudaSuccess);  // the error is cleared for the next call
  backend.synchronize();

  std::byte byte{};
  void* const device = backend.allocator().allocate(1);
  gpu.fails["cudaMemcpyAsync"] = {cudaErrorLaunchFailure, cudaErrorLaunchFailure};
  CHECK_THROWS_HOLDING(CudaError,
                       "copying to the device: ", backend.copy_from_host(device, &byte, 1));
  CHECK_THROWS_HOLDING(CudaError, "copying to the host: ", backend.copy_to_host(&byte, device, 1));
  backend.copy_from_host(device, &byte, 1);
  backend.allocator().deallocate(device, 1);
}

TEST_CASE_FIXTURE(Fixture, "a kernel that fails to launch is reported with its launch shape") {
  const auto context =
      Context::create({.device = {DeviceType::CUDA, 0}, .plugin = TESSERA_FAKE_CUDA_PLUGIN});
  using kernels::cuda::launch;
  launch(*context, "fine", kernel, {.grid = 2, .block = 64}, 1);
  context->backend().synchronize();
  CHECK(gpu.launched.size() == 1);

  gpu.fails["cudaLaunchKernelExC"] = {cudaErrorInvalidConfiguration};
  CHECK_THROWS_HOLDING(CudaError,
                       "norm_forward: 2 x 3 x 1 blocks of 2048 threads with 64 bytes of shared "
                       "memory: invalid configuration argument",
                       launch(*context, "norm_forward", kernel,
                              {.grid = 2, .block = 2048, .shared_bytes = 64, .grid_y = 3}, 1));
  CHECK_THROWS_HOLDING(Unsupported,
                       "attention: a block needs 262144 bytes of shared memory, more than the "
                       "232448 of this GPU",
                       launch(*context, "attention", kernel,
                              {.grid = 1, .block = 32, .shared_bytes = 256 * 1024}, 1));
  CHECK(cudaGetLastError() == cudaSuccess);
  launch(*context, "fine", kernel, {.shared_bytes = 100 * 1024}, 1);
  context->backend().synchronize();
  CHECK(gpu.launched.size() == 2);
}

}  // namespace tessera::test
