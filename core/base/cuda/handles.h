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

/// A point in a stream's work.
class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const Stream& stream) {
    check(cudaEventRecord(event_, stream.get()), "cudaEventRecord");
  }
  void synchronize() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  /// Makes later work of `stream` wait for this event.
  void hold_back(const Stream& stream) const {
    check(cudaStreamWaitEvent(stream.get(), event_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// A point in a stream's work, with its time.
class TimedEvent {
 public:
  TimedEvent() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~TimedEvent() { cudaEventDestroy(event_); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  void record(const Stream& stream) {
    check(cudaEventRecord(event_, stream.get()), "cudaEventRecord");
  }
  /// Both events must have completed.
  double milliseconds_since(const TimedEvent& other) const {
    float result = 0;
    check(cudaEventElapsedTime(&result, other.event_, event_), "cudaEventElapsedTime");
    return static_cast<double>(result);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Page-locked host memory; bytes may be 0.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes > 0) check(cudaMallocHost(&data_, bytes), "cudaMallocHost");
  }
  ~PinnedBuffer() { cudaFreeHost(data_); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace tessera::cuda
