#pragma once

#include <cublasLt.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/capture_allocator.h"
#include "core/base/cuda/handles.h"
#include "core/base/device_backend.h"
#include "core/base/plugin_kernels.h"

namespace tessera {
class Context;
}

namespace tessera::cuda {

/// Owns a cuBLASLt handle.
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

/// Whatever a kernel's host functions keep between calls: plans by shape.
class KernelState {
 public:
  virtual ~KernelState() = default;
};

/// One GPU: a stream on which everything runs in the order of the calls.
///
/// Memory that is given back may be handed out again at once, to work that comes later on the
/// stream. Who uses memory on another stream makes this one wait for it first.
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
  Allocator& allocator() override;
  Allocator& host_allocator() override { return *host_allocator_; }
  bool run_kernel(std::string_view name, Context& context, const void* args) override;
  void copy_from_host(void* to, const void* from, std::size_t bytes) override;
  void copy_to_host(void* to, const void* from, std::size_t bytes) override;
  void synchronize() override;
  void begin_capture(const CapturedWork* within) override;
  std::unique_ptr<CapturedWork> end_part() override;
  std::unique_ptr<CapturedWork> end_capture() override;
  void abandon_capture() noexcept override;
  void* stream() override { return stream_->get(); }
  std::vector<std::string> take_notes() override { return std::exchange(notes_, {}); }
  void begin_range(const char* name) override;
  void end_range() override;
  std::size_t mark() override;
  std::vector<double> take_marks() override;

  /// For take_notes(); what was said once is not said again.
  void note(const std::string& text);

  const cudaDeviceProp& properties() const { return properties_; }
  CublasLt& cublas_lt() { return *cublas_lt_; }
  /// Of the matrix products. @see kernels/cuda/matmul.cpp
  std::unique_ptr<KernelState> matmul_state;
  /// Of attention. @see kernels/cuda/attention_choice.cpp
  std::unique_ptr<KernelState> attention_state;

 private:
  class DeviceAllocator;

  /// @throws InternalError while a capture is under way
  void require_running(const char* what) const;
  void begin_part();
  std::unique_ptr<CapturedMemory> end_capture_of_memory();
  /// Work is started on the calling thread's current device.
  void make_current() const { check(cudaSetDevice(index_), "cudaSetDevice"); }

  const int index_;
  cudaDeviceProp properties_{};
  PluginKernels kernels_;
  std::unique_ptr<Stream> stream_;
  // Memory for a capture cannot be asked for on the stream that is captured.
  std::unique_ptr<Stream> capture_memory_stream_;
  DeviceAllocator* device_allocator_ = nullptr;  // allocator_'s memory
  std::unique_ptr<CaptureAllocator> allocator_;
  std::unique_ptr<Allocator> host_allocator_;
  bool capturing_ = false;
  std::unique_ptr<CublasLt> cublas_lt_;
  // Of copies to the device, used in turn.
  struct Staging {
    std::unique_ptr<PinnedBuffer> memory;
    std::unique_ptr<Event> copied;
  };
  std::array<Staging, 8> staging_;
  std::size_t next_staging_ = 0;
  std::vector<std::string> notes_;
  std::set<std::string> noted_;
  std::vector<std::unique_ptr<TimedEvent>> marks_;  // the first used_marks_ are placed
  std::size_t used_marks_ = 0;
};

}  // namespace tessera::cuda
