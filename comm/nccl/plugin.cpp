// Implements NcclDriver over NCCL and CUDA; callers handle the statuses.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cctype>
#include <cstring>

#include "comm/nccl/driver.h"
#include "core/base/cuda/handles.h"

namespace tessera::comm {
namespace {

using cuda::check;

constexpr int kOldestVersion = 21800;  // first with ncclCommFinalize and non-blocking mode

// Most blocks that a collective runs: each holds a multiprocessor, and collectives overlap with
// compute. NCCL alone runs up to 24 for rings within a host of H100s, where 16 are its choice for
// NVLink SHARP, and from 16 on adds none for the network. NCCL_MAX_CTAS overrides this.
constexpr int kMaxCtas = 16;

ncclDataType_t reduced_type(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return ncclFloat32;
    case DType::F64:
      return ncclFloat64;
    case DType::BF16:
      return ncclBfloat16;
    case DType::I64:
      return ncclInt64;
    default:
      throw InternalError("nccl can't reduce {}", dtype);
  }
}

class StreamEvent final : public NcclEvent {
 public:
  StreamEvent(int index, cudaStream_t stream) : index_(index) { event_.record(stream); }
  ~StreamEvent() override { cudaSetDevice(index_); }
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  bool is_done() const override {
    // A thread's first CUDA call would otherwise initialize the first GPU.
    check(cudaSetDevice(index_), "cudaSetDevice");
    return event_.is_done("work of the communication stream");
  }
  void hold_back(cudaStream_t stream) const { event_.hold_back(stream); }

 private:
  const int index_;
  cuda::Event event_;
};

class Driver final : public NcclDriver {
 public:
  Driver(int index, cudaStream_t compute, const std::string& device_id)
      : index_(index), compute_(compute), device_id_(device_id) {
    check_device(device_id);
    int version = 0;
    require<Unsupported>(ncclGetVersion(&version) == ncclSuccess && version >= kOldestVersion,
                         "NCCL {} is too old; tessera needs 2.18 or newer", words(version));
    version_ = words(version);
    make_current();
    int lowest = 0, highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
          "cudaStreamCreate");
  }
  ~Driver() override {
    cudaSetDevice(index_);
    cudaStreamDestroy(stream_);
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  std::string version() const override { return version_; }
  std::unique_ptr<NcclDriver> open_again() const override {
    return std::make_unique<Driver>(index_, compute_, device_id_);
  }

  std::string make_unique_id() override {
    make_current();
    ncclUniqueId id;
    const ncclResult_t result = ncclGetUniqueId(&id);
    require<CudaError>(result == ncclSuccess, "ncclGetUniqueId: {}", describe(result));
    return {id.internal, sizeof id.internal};
  }

  NcclStatus init(std::string_view unique_id, int rank, int world_size) override {
    make_current();
    rank_ = static_cast<std::size_t>(rank);
    world_size_ = static_cast<std::size_t>(world_size);
    ncclUniqueId id;
    require<InternalError>(unique_id.size() == sizeof id.internal,
                           "NCCL's unique id has {} bytes, expected {}", unique_id.size(),
                           sizeof id.internal);
    std::memcpy(id.internal, unique_id.data(), sizeof id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = kMaxCtas;
    return status_of(ncclCommInitRankConfig(&comm_, world_size, id, rank, &config));
  }

  NcclStatus status() override {
    make_current();
    ncclResult_t result = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
    return status_of(asked == ncclSuccess ? result : asked);
  }

  NcclStatus run(std::span<const Collective> collectives) override {
    make_current();
    if (collectives.size() == 1) return status_of(launch(collectives.front()));
    ncclResult_t result = ncclGroupStart();
    if (result != ncclSuccess) return status_of(result);
    try {
      for (const Collective& collective : collectives) {
        result = launch(collective);
        if (result != ncclSuccess && result != ncclInProgress) break;
      }
    } catch (...) {
      ncclGroupEnd();
      throw;
    }
    const ncclResult_t ended = ncclGroupEnd();
    return status_of(result != ncclSuccess && result != ncclInProgress ? result : ended);
  }

  NcclStatus finalize() override {
    make_current();
    return status_of(ncclCommFinalize(comm_));
  }
  void destroy() noexcept override {
    cudaSetDevice(index_);
    if (comm_ != nullptr) ncclCommDestroy(comm_);
    comm_ = nullptr;
  }
  void abort() noexcept override {
    cudaSetDevice(index_);
    if (comm_ != nullptr) ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  void wait_for_compute() override {
    make_current();
    StreamEvent(index_, compute_).hold_back(stream_);  // the wait outlives the event
  }
  void hold_back_compute(const NcclEvent& event) override {
    make_current();
    static_cast<const StreamEvent&>(event).hold_back(compute_);
  }
  std::unique_ptr<NcclEvent> record() override {
    make_current();
    return std::make_unique<StreamEvent>(index_, stream_);
  }
  void copy_to_device(void* to, const void* from, std::size_t bytes) override {
    make_current();
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_),
          "copying to the device");
  }
  void copy_to_host(void* to, const void* from, std::size_t bytes) override {
    make_current();
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "copying to the host");
  }

 private:
  static std::string words(int version) {
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  }

  // The CUDA runtime may number devices differently from the context.
  void check_device(std::string own) const {
    char id[32] = {};
    const cudaError_t status = cudaDeviceGetPCIBusId(id, sizeof id, index_);
    cudaGetLastError();
    int driver = 0;
    cudaDriverGetVersion(&driver);
    require<Unsupported>(
        status == cudaSuccess, "NCCL can't use cuda:{}: {}", index_,
        driver == 0 ? "no NVIDIA driver is installed" : cudaGetErrorString(status));
    std::string theirs = id;
    for (std::string* text : {&own, &theirs}) {  // "0000:3b:00" matches "0000:3B:00.0"
      for (char& c : *text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    require<Unsupported>(!own.empty() && theirs.starts_with(own),
                         "NCCL can't use cuda:{}: the context computes on {}, CUDA has {} there",
                         index_, own, theirs);
  }

  ncclResult_t launch(const Collective& c) {
    const auto count = static_cast<std::size_t>(c.count);
    switch (c.kind) {
      case CollectiveKind::AllGather: {  // as bytes, because nothing is computed
        const std::size_t part = c.bytes() / world_size_;
        return ncclAllGather(static_cast<const std::byte*>(c.out) + rank_ * part, c.out, part,
                             ncclUint8, comm_, stream_);
      }
      case CollectiveKind::ReduceScatter:
        return ncclReduceScatter(c.in, c.out, count / world_size_, reduced_type(c.dtype), ncclSum,
                                 comm_, stream_);
      case CollectiveKind::AllReduce:
        return ncclAllReduce(c.out, c.out, count, reduced_type(c.dtype),
                             c.op == ReduceOp::Sum ? ncclSum : ncclMax, comm_, stream_);
      case CollectiveKind::Broadcast:
        return ncclBroadcast(c.out, c.out, c.bytes(), ncclUint8, c.root, comm_, stream_);
      case CollectiveKind::Barrier:
        break;
    }
    return ncclInvalidUsage;  // the caller replaces barriers with all_reduce
  }

  void make_current() const { check(cudaSetDevice(index_), "cudaSetDevice"); }

  std::string describe(ncclResult_t result) const {
    const char* last = ncclGetLastError(comm_);
    return last == nullptr || *last == '\0'
               ? std::string(ncclGetErrorString(result))
               : fmt::format("{} ({})", ncclGetErrorString(result), last);
  }

  NcclStatus status_of(ncclResult_t result) const {
    switch (result) {
      case ncclSuccess:
        return {};
      case ncclInProgress:
        return {.state = NcclStatus::State::InProgress};
      default:
        return {.state = NcclStatus::State::Failed,
                .remote = result == ncclRemoteError || result == ncclSystemError,
                .text = "NCCL: " + describe(result)};
    }
  }

  const int index_;
  const cudaStream_t compute_;
  const std::string device_id_;
  cudaStream_t stream_ = nullptr;
  ncclComm_t comm_ = nullptr;
  std::string version_;
  std::size_t rank_ = 0, world_size_ = 1;
};

}  // namespace
}  // namespace tessera::comm

extern "C" {
__attribute__((visibility("default"))) int tessera_nccl_plugin_version() {
  return tessera::comm::kNcclPluginVersion;
}
__attribute__((visibility("default"))) tessera::comm::NcclDriver* tessera_open_nccl(
    int index, void* compute_stream, const char* device_id) {
  return new tessera::comm::Driver(index, static_cast<cudaStream_t>(compute_stream), device_id);
}
}
