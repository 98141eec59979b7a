#include "core/base/cuda/backend.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>

#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "core/base/system_memory.h"

namespace tessera::cuda {
namespace {

constexpr int kOldestMajor = 8;  // for bf16 tensor cores and cp.async
constexpr std::size_t kStagingBytes = std::size_t{1} << 20;

/// Pinned memory, which takes long to get: freed blocks are reused for requests of about their size.
class PinnedAllocator final : public Allocator {
 public:
  explicit PinnedAllocator(int index) : index_(index) {}
  ~PinnedAllocator() override { free_idle(); }
  PinnedAllocator(const PinnedAllocator&) = delete;
  PinnedAllocator& operator=(const PinnedAllocator&) = delete;

  void* allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    require<OutOfMemory>(bytes <= kMostBytes, "{} bytes requested, more than any machine has",
                         bytes);
    const std::size_t step = std::max(std::bit_floor(bytes) / 8, kPage);
    const std::size_t wanted = (bytes + step - 1) / step * step;
    {
      const std::lock_guard lock(mutex_);
      const auto found = idle_.lower_bound(wanted);
      if (found != idle_.end() && found->first <= wanted + wanted / 4) {
        void* const data = found->second;
        in_use_[data] = found->first;
        idle_.erase(found);
        return data;
      }
    }
    void* data = take(wanted);
    if (data == nullptr) {  // retry without idle blocks
      free_idle();
      data = take(wanted);
    }
    const std::lock_guard lock(mutex_);
    const auto text = [](std::size_t n) { return format_bytes(static_cast<std::int64_t>(n)); };
    require<OutOfMemory>(data != nullptr, "pinned host memory is exhausted: {} requested, {} held",
                         text(wanted), text(reserved_));
    in_use_[data] = wanted;
    reserved_ += wanted;
    return data;
  }
  void deallocate(void* data, std::size_t) noexcept override {
    if (data == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto found = in_use_.find(data);
    idle_.emplace(found->second, data);
    in_use_.erase(found);
  }
  std::size_t reserved_bytes() const override {
    const std::lock_guard lock(mutex_);
    return reserved_;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kMostBytes = std::size_t{1} << 56;  // that can be rounded up

  void* take(std::size_t bytes) const {
    check(cudaSetDevice(index_), "cudaSetDevice");
    void* data = nullptr;
    const cudaError_t status = cudaMallocHost(&data, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    check(status, "cudaMallocHost");
    return data;
  }
  void free_idle() noexcept {
    const std::lock_guard lock(mutex_);
    for (const auto& [bytes, data] : idle_) {
      cudaFreeHost(data);
      reserved_ -= bytes;
    }
    idle_.clear();
  }

  const int index_;
  mutable std::mutex mutex_;
  std::multimap<std::size_t, void*> idle_;
  std::map<void*, std::size_t> in_use_;
  std::size_t reserved_ = 0;
};

int counted_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    int driver = 0;
    cudaDriverGetVersion(&driver);
    throw Unsupported("no GPU can be used: {}",
                      driver == 0 ? "no NVIDIA driver is installed" : cudaGetErrorString(status));
  }
  require<Unsupported>(count > 0, "no GPU can be used: the driver shows none");
  return count;
}

int checked_device(int index) {
  const int count = counted_devices();
  require<Unsupported>(index >= 0 && index < count,
                       "there is no cuda:{}; this machine has {} GPU{}", index, count,
                       count == 1 ? "" : "s");
  return index;
}

// Pools of the process, with their devices.
struct OpenPools {
  std::mutex mutex;
  std::vector<std::pair<int, cudaMemPool_t>> pools;
};
OpenPools& open_pools() {
  static auto& all = *new OpenPools;  // outlives every context
  return all;
}

void allow_access(int device, cudaMemPool_t pool, int pool_device) {
  int is_possible = 0;
  if (device != pool_device)
    check(cudaDeviceCanAccessPeer(&is_possible, device, pool_device), "cudaDeviceCanAccessPeer");
  if (is_possible == 0) return;
  cudaMemAccessDesc access{};
  access.location = {cudaMemLocationTypeDevice, device};
  access.flags = cudaMemAccessFlagsProtReadWrite;
  // Refused, for example, in some virtual machines. Only NCCL needs it, and reports that in its own words.
  if (cudaMemPoolSetAccess(pool, &access, 1) != cudaSuccess) cudaGetLastError();
}

}  // namespace

CublasLt::CublasLt() {
  const cublasStatus_t status = cublasLtCreate(&handle_);
  require<CudaError>(status == CUBLAS_STATUS_SUCCESS, "cublasLtCreate: {}",
                     cublasLtGetStatusString(status));
}

/// Allocates from a CUDA memory pool, in the order of one stream. Keeps freed memory for reuse.
/// Devices of the same process can access it where the hardware allows, because NCCL reads and writes
/// the buffers of ranks in one process directly.
class CudaBackend::DeviceAllocator final : public Allocator {
 public:
  DeviceAllocator(int index, cudaStream_t stream) : index_(index), stream_(stream) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, index};
    check(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
    std::uint64_t keep_all = std::numeric_limits<std::uint64_t>::max();
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all),
          "cudaMemPoolSetAttribute");
    OpenPools& open = open_pools();
    const std::lock_guard lock(open.mutex);
    for (const auto& [other_index, other] : open.pools) {
      allow_access(other_index, pool_, index);
      allow_access(index, other, other_index);
    }
    open.pools.emplace_back(index, pool_);
  }
  ~DeviceAllocator() override {
    OpenPools& open = open_pools();
    const std::lock_guard lock(open.mutex);
    std::erase(open.pools, std::pair(index_, pool_));
    cudaMemPoolDestroy(pool_);
  }
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;

  void* allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    check(cudaSetDevice(index_), "cudaSetDevice");
    void* data = nullptr;
    cudaError_t status = cudaMallocFromPoolAsync(&data, bytes, pool_, stream_);
    if (status == cudaErrorMemoryAllocation) {  // retry without the pool's idle memory
      cudaGetLastError();
      check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      cudaMemPoolTrimTo(pool_, 0);
      status = cudaMallocFromPoolAsync(&data, bytes, pool_, stream_);
    }
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw OutOfMemory("memory of cuda:{} is exhausted: {} requested, {} held{}", index_,
                        format_bytes(static_cast<std::int64_t>(bytes)),
                        format_bytes(static_cast<std::int64_t>(reserved_bytes())),
                        memory_of_device());
    }
    check(status, "cudaMallocFromPoolAsync");
    return data;
  }
  void deallocate(void* data, std::size_t) noexcept override {
    if (data == nullptr) return;
    cudaSetDevice(index_);
    cudaFreeAsync(data, stream_);
  }
  std::size_t reserved_bytes() const override {
    std::uint64_t bytes = 0;
    cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &bytes);
    return bytes;
  }

 private:
  const int index_;
  const cudaStream_t stream_;
  cudaMemPool_t pool_ = nullptr;
};

CudaBackend::CudaBackend(int index) : index_(checked_device(index)) {
  make_current();
  check(cudaGetDeviceProperties(&properties_, index_), "cudaGetDeviceProperties");
  require<Unsupported>(properties_.major >= kOldestMajor,
                       "cuda:{} ({}) has compute capability {}.{}; tessera needs {}.0 or newer",
                       index_, properties_.name, properties_.major, properties_.minor,
                       kOldestMajor);
  int has_pools = 0;
  check(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, index_),
        "cudaDeviceGetAttribute");
  require<Unsupported>(has_pools != 0, "cuda:{} ({}) has no memory pools, which tessera needs",
                       index_, properties_.name);
  cublas_lt_ = std::make_unique<CublasLt>();
  const std::size_t version = cublasLtGetVersion();
  product_tuning_ = std::make_unique<ProductTuning>(
      fmt::format("{}, cuBLASLt {}.{}.{}", properties_.name, version / 10000, version / 100 % 100,
                  version % 100));
  stream_ = std::make_unique<Stream>();
  allocator_ = std::make_unique<DeviceAllocator>(index_, stream_->get());
  host_allocator_ = std::make_unique<PinnedAllocator>(index_);
  for (Staging& staging : staging_) {
    staging.memory = std::make_unique<PinnedBuffer>(kStagingBytes);
    staging.copied = std::make_unique<Event>();
  }
}

CudaBackend::~CudaBackend() {
  cudaSetDevice(index_);
  cudaStreamSynchronize(stream_->get());
  attention_state.reset();  // may use the stream
  matmul_state.reset();
}

std::string CudaBackend::description() const {
  return fmt::format("{}, compute capability {}.{}, {}", properties_.name, properties_.major,
                     properties_.minor,
                     format_bytes(static_cast<std::int64_t>(properties_.totalGlobalMem)));
}

std::string CudaBackend::device_id() const {
  return fmt::format("{:04x}:{:02x}:{:02x}", properties_.pciDomainID, properties_.pciBusID,
                     properties_.pciDeviceID);
}

SystemMemory CudaBackend::memory() const {
  std::size_t free = 0, total = 0;
  cudaSetDevice(index_);
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
    cudaGetLastError();  // the allocation that needs the memory will report it
    return {};
  }
  return {static_cast<std::int64_t>(total), static_cast<std::int64_t>(free)};
}

bool CudaBackend::run_kernel(std::string_view name, Context& context, const void* args) {
  make_current();
  return kernels_.run(name, context, args);
}

Allocator& CudaBackend::allocator() { return *allocator_; }

void CudaBackend::copy_from_host(void* to, const void* from, std::size_t bytes) {
  make_current();
  for (std::size_t done = 0; done < bytes; done += kStagingBytes) {
    const std::size_t part = std::min(kStagingBytes, bytes - done);
    Staging& staging = staging_[next_staging_];
    next_staging_ = (next_staging_ + 1) % staging_.size();
    staging.copied->synchronize();
    std::memcpy(staging.memory->data(), static_cast<const std::byte*>(from) + done, part);
    check(cudaMemcpyAsync(static_cast<std::byte*>(to) + done, staging.memory->data(), part,
                          cudaMemcpyHostToDevice, stream_->get()),
          "copying to the device");
    staging.copied->record(stream_->get());
  }
}

void CudaBackend::copy_to_host(void* to, const void* from, std::size_t bytes) {
  make_current();
  if (bytes == 0) return;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_->get()),
        "copying to the host");
  stream_->synchronize();
}

void CudaBackend::synchronize() {
  make_current();
  stream_->synchronize();
}

void CudaBackend::note(const std::string& text) {
  if (noted_.insert(text).second) notes_.push_back(text);
}

void CudaBackend::begin_range(const char* name) { nvtxRangePushA(name); }
void CudaBackend::end_range() { nvtxRangePop(); }

std::size_t CudaBackend::mark() {
  make_current();
  if (used_marks_ == marks_.size()) marks_.push_back(std::make_unique<Event>(cudaEventDefault));
  marks_[used_marks_]->record(stream_->get());
  return used_marks_++;
}

std::vector<double> CudaBackend::take_marks() {
  synchronize();
  std::vector<double> times;
  for (std::size_t i = 0; i < used_marks_; ++i)
    times.push_back(marks_[i]->milliseconds_since(*marks_.front()));
  used_marks_ = 0;
  return times;
}

}  // namespace tessera::cuda

extern "C" {
__attribute__((visibility("default"))) int tessera_plugin_version() {
  return tessera::kPluginVersion;
}
__attribute__((visibility("default"))) int tessera_device_count() {
  return tessera::cuda::counted_devices();
}
__attribute__((visibility("default"))) tessera::DeviceBackend* tessera_open_device(int index) {
  return new tessera::cuda::CudaBackend(index);
}
}
