#pragma once

#include <cublasLt.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/cuda/handles.h"
#include "core/base/device_backend.h"
#include "core/base/plugin_kernels.h"
#include "core/base/product_tuning.h"
#include "core/base/system_memory.h"

namespace tessera {
class Context;
}

namespace tessera::cuda {

class CublasLt {
 public:
  CublasLt();
  ~CublasLt() { cublasLtDestroy(handle_); }
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;
  cublasLtHandle_t get() const { return handle_; }

 private:
  cublasLtHandle_t handle_ = nullptr;
};

/// State that a kernel's host code keeps between calls, such as plans by shape.
class KernelState {
 public:
  virtual ~KernelState() = default;
};

/// One GPU with one stream, on which all work runs in call order.
///
/// Later work of the stream may reuse freed memory at once. Before memory used on another stream is
/// freed, make this stream wait for that one.
class CudaBackend final : public DeviceBackend {
 public:
  /// @throws Unsupported if there is no such device, or it is older than compute capability 8.0
  explicit CudaBackend(int index);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  std::string description() const override;
  std::string device_id() const override;
  SystemMemory memory() const override;
  DeviceLimits limits() const override {
    return {properties_.multiProcessorCount, static_cast<int>(properties_.sharedMemPerBlockOptin)};
  }
  Allocator& allocator() override;
  Allocator& host_allocator() override { return *host_allocator_; }
  bool run_kernel(std::string_view name, Context& context, const void* args) override;
  ProductTuning& product_tuning() override { return *product_tuning_; }
  void copy_from_host(void* to, const void* from, std::size_t bytes) override;
  void copy_to_host(void* to, const void* from, std::size_t bytes) override;
  void synchronize() override;
  void* stream() override { return stream_->get(); }
  std::vector<std::string> take_notes() override { return std::exchange(notes_, {}); }
  void begin_range(const char* name) override;
  void end_range() override;
  std::size_t mark() override;
  std::vector<double> take_marks() override;

  /// Adds a message to take_notes(), once per text.
  void note(const std::string& text);

  const cudaDeviceProp& properties() const { return properties_; }
  CublasLt& cublas_lt() { return *cublas_lt_; }
  /// State of matrix products. @see kernels/cuda/matmul.cpp
  std::unique_ptr<KernelState> matmul_state;
  /// State of attention. @see kernels/cuda/attention_choice.cpp
  std::unique_ptr<KernelState> attention_state;

 private:
  class DeviceAllocator;

  /// Makes this GPU the calling thread's current device, on which the thread starts work.
  void make_current() const { check(cudaSetDevice(index_), "cudaSetDevice"); }

  const int index_;
  cudaDeviceProp properties_{};
  PluginKernels kernels_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Allocator> allocator_;
  std::unique_ptr<Allocator> host_allocator_;
  std::unique_ptr<CublasLt> cublas_lt_;
  std::unique_ptr<ProductTuning> product_tuning_;
  // Buffers for copies to the device, used in turn.
  struct Staging {
    std::unique_ptr<PinnedBuffer> memory;
    std::unique_ptr<Event> copied;
  };
  std::array<Staging, 8> staging_;
  std::size_t next_staging_ = 0;
  std::vector<std::string> notes_;
  std::set<std::string> noted_;
  std::vector<std::unique_ptr<Event>> marks_;  // the first used_marks_ are recorded
  std::size_t used_marks_ = 0;
};

}  // namespace tessera::cuda
