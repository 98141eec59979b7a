#include "tests/support/cuda_runtime/fake_gpu.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

using tessera::test::fake_gpu;
using tessera::test::FakeGpu;
using Work = std::function<void()>;

struct CUstream_st {
  std::deque<Work> queue;
  std::size_t done = 0;  // items executed since the start

  void add(Work work) { queue.push_back(std::move(work)); }
  std::size_t end() const { return done + queue.size(); }
  void run_to(std::size_t place) {
    while (done < place && !queue.empty()) {
      const Work work = std::move(queue.front());
      queue.pop_front();
      ++done;
      work();
    }
  }
};
struct CUevent_st {
  cudaStream_t stream = nullptr;
  std::size_t place = 0;
};
struct CUmemPoolHandle_st {
  int device = 0;
};

namespace {

cudaError_t last_error = cudaSuccess;
std::map<void*, std::size_t> blocks;  // device allocations

// Counts a call and returns its status.
cudaError_t answer(const char* name) {
  FakeGpu& gpu = fake_gpu();
  ++gpu.calls[name];
  auto& fails = gpu.fails[name];
  if (fails.empty()) return cudaSuccess;
  last_error = fails.front();
  fails.pop_front();
  return last_error;
}

template <typename T>
cudaError_t make(const char* call, const char* kind, T** out) {
  const cudaError_t status = answer(call);
  if (status != cudaSuccess) return status;
  *out = new T();
  ++fake_gpu().alive[kind];
  return cudaSuccess;
}

template <typename T>
cudaError_t destroy(const char* kind, T* handle) {
  if (handle == nullptr) return cudaSuccess;
  delete handle;
  --fake_gpu().alive[kind];
  return cudaSuccess;
}

}  // namespace

FakeGpu& tessera::test::fake_gpu() {
  static FakeGpu gpu;
  return gpu;
}

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    default:
      return "cudaErrorOfAnotherKind";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    default:
      return "some error";
  }
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaGetDeviceCount(int* count) {
  FakeGpu& gpu = fake_gpu();
  *count = gpu.driver == cudaSuccess ? gpu.count : 0;
  if (gpu.driver != cudaSuccess) last_error = gpu.driver;
  return gpu.driver;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = fake_gpu().driver_version;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return answer("cudaSetDevice"); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  const FakeGpu& gpu = fake_gpu();
  *properties = {};
  std::strncpy(properties->name, gpu.name.c_str(), sizeof(properties->name) - 1);
  properties->major = gpu.major;
  properties->minor = gpu.minor;
  properties->totalGlobalMem = gpu.bytes;
  properties->pciBusID = 0x41;
  properties->multiProcessorCount = 1;
  properties->sharedMemPerBlockOptin = static_cast<std::size_t>(gpu.shared_bytes);
  return answer("cudaGetDeviceProperties");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const FakeGpu& gpu = fake_gpu();
  *value = attribute == cudaDevAttrMemoryPoolsSupported ? int{gpu.has_pools} : 1;
  return answer("cudaDeviceGetAttribute");
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = fake_gpu().bytes - fake_gpu().reserved;
  *total = fake_gpu().bytes;
  return answer("cudaMemGetInfo");
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return make("cudaStreamCreateWithFlags", "stream", stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream != nullptr) stream->run_to(stream->end());
  return destroy("stream", stream);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->run_to(stream->end());
  return answer("cudaStreamSynchronize");
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stream->add([waited = *event] {
    if (waited.stream != nullptr) waited.stream->run_to(waited.place);
  });
  return answer("cudaStreamWaitEvent");
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return make("cudaEventCreateWithFlags", "event", event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return destroy("event", event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *event = {stream, stream->end()};
  return answer("cudaEventRecord");
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->stream != nullptr) event->stream->run_to(event->place);
  return answer("cudaEventSynchronize");
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = static_cast<float>(end->place) - static_cast<float>(start->place);
  return answer("cudaEventElapsedTime");
}

cudaError_t cudaMallocHost(void** data, size_t bytes) {
  const cudaError_t status = answer("cudaMallocHost");
  if (status != cudaSuccess) return status;
  *data = std::malloc(bytes);
  ++fake_gpu().alive["pinned"];
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  if (data != nullptr) --fake_gpu().alive["pinned"];
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  const cudaError_t status = make("cudaMemPoolCreate", "pool", pool);
  if (status == cudaSuccess) (*pool)->device = properties->location.id;
  return status;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = fake_gpu().peers.contains({device, peer}) ? 1 : 0;
  return answer("cudaDeviceCanAccessPeer");
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* access,
                                 size_t count) {
  for (size_t i = 0; i < count; ++i)
    fake_gpu().access.insert({access[i].location.id, pool->device});
  return answer("cudaMemPoolSetAccess");
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  fake_gpu().reserved = 0;
  return destroy("pool", pool);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return answer("cudaMemPoolSetAttribute");
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<std::uint64_t*>(value) = fake_gpu().reserved;
  return answer("cudaMemPoolGetAttribute");
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t keep) {
  FakeGpu& gpu = fake_gpu();
  gpu.reserved = std::max(gpu.used, std::min(gpu.reserved, keep));
  return answer("cudaMemPoolTrimTo");
}
cudaError_t cudaMallocFromPoolAsync(void** data, size_t bytes, cudaMemPool_t, cudaStream_t) {
  FakeGpu& gpu = fake_gpu();
  cudaError_t status = answer("cudaMallocFromPoolAsync");
  if (status == cudaSuccess && gpu.used + bytes > gpu.bytes) {
    status = last_error = cudaErrorMemoryAllocation;
  }
  if (status != cudaSuccess) return status;
  *data = std::malloc(bytes);
  blocks[*data] = bytes;
  gpu.used += bytes;
  gpu.reserved = std::max(gpu.reserved, gpu.used);
  ++gpu.alive["device"];
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  fake_gpu().used -= blocks[data];
  blocks.erase(data);
  --fake_gpu().alive["device"];
  stream->add([data] { std::free(data); });
  return answer("cudaFreeAsync");
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const cudaError_t status = answer("cudaMemcpyAsync");
  if (status == cudaSuccess) stream->add([=] { std::memcpy(to, from, bytes); });
  return status;
}
cudaError_t cudaMemset2DAsync(void* data, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  const cudaError_t status = answer("cudaMemset2DAsync");
  if (status == cudaSuccess)
    stream->add([=] {
      for (size_t row = 0; row < height; ++row)
        std::memset(static_cast<std::byte*>(data) + row * pitch, value, width);
    });
  return status;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  const cudaError_t status = answer("cudaFuncSetAttribute");
  if (status != cudaSuccess || value <= fake_gpu().shared_bytes) return status;
  return last_error = cudaErrorInvalidValue;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  const cudaError_t status = answer("cudaLaunchKernelExC");
  if (status == cudaSuccess) {
    config->stream->add([kernel] { fake_gpu().launched.push_back(kernel); });
  }
  return status;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = nullptr;
  return answer("cublasLtCreate") == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                 : CUBLAS_STATUS_NOT_INITIALIZED;
}
std::size_t cublasLtGetVersion() { return 130100; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
const char* cublasLtGetStatusString(cublasStatus_t) { return "CUBLAS_STATUS_NOT_INITIALIZED"; }

}  // extern "C"
