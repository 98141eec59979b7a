#pragma once

#include <cuda_runtime_api.h>

#include "core/base/cuda/check.h"

namespace tessera::cuda {

/// A stream that does not wait for the default stream.
class Stream {
 public:
  Stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  /// Waits on the host. @throws CudaError if earlier work failed
  void synchronize() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A point in a stream's work. @param flags  cudaEventDefault: also records the time
class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) {
    check(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreate");
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void synchronize() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  /// Does not wait. @throws CudaError naming `what` if the work failed
  bool is_done(std::string_view what) const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();  // clears the status, which is no error
      return false;
    }
    check(status, what);
    return true;
  }
  /// Makes later work of `stream` wait for this event.
  void hold_back(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  /// Both events have times and must have completed.
  double milliseconds_since(const Event& other) const {
    float result = 0;
    check(cudaEventElapsedTime(&result, other.event_, event_), "cudaEventElapsedTime");
    return static_cast<double>(result);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class PinnedBuffer {
 public:
  explicit PinnedBuffer(std::size_t bytes) {
    check(cudaMallocHost(&data_, bytes), "cudaMallocHost");
  }
  ~PinnedBuffer() { cudaFreeHost(data_); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace tessera::cuda
