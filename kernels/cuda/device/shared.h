#pragma once

#include "kernels/cuda/device/number.h"
#include "kernels/cuda/device/platform.h"

namespace tessera::kernels::cuda {

#if defined(TESSERA_FIBER)

/// Reference to an element of shared memory. On fibers only: checks each access for bounds, races and
/// reads of unwritten memory.
template <typename T>
class SharedElement {
 public:
  explicit SharedElement(T* at) : at_(at) {}
  SharedElement(const SharedElement&) = default;
  operator T() const {  // NOLINT(google-explicit-constructor): stands for a T&
    fiber::check_read(at_, sizeof(T));
    return *at_;
  }
  T operator=(T value) const {  // NOLINT: a reference is assigned through
    fiber::check_write(at_, sizeof(T));
    return *at_ = value;
  }
  T operator=(const SharedElement& other) const { return *this = static_cast<T>(other); }  // NOLINT
  T operator+=(T value) const { return *this = static_cast<T>(*this) + value; }
  T operator*=(T value) const { return *this = static_cast<T>(*this) * value; }

 private:
  T* at_;
};

/// An array in shared memory.
template <typename T>
class SharedArray {
 public:
  explicit SharedArray(T* data) : data_(data) {}
  SharedElement<T> operator[](int i) const { return SharedElement<T>(data_ + i); }
  SharedArray from(int i) const { return SharedArray(data_ + i); }
  T* data() const { return data_; }  // for operations that check for themselves
  template <int N>
  Pack<T, N> load(int i) const {
    fiber::check_read(data_ + i, sizeof(T) * N);
    return load_pack<N>(data_ + i);
  }
  template <int N>
  void store(int i, const Pack<T, N>& pack) const {
    fiber::check_write(data_ + i, sizeof(T) * N);
    store_pack<N>(data_ + i, pack);
  }

 private:
  T* data_;
};

inline std::byte* shared_begin() { return fiber::shared_memory(); }

#else

template <typename T>
class SharedArray {
 public:
  __device__ __forceinline__ explicit SharedArray(T* data) : data_(data) {}
  __device__ __forceinline__ T& operator[](int i) const { return data_[i]; }
  __device__ __forceinline__ SharedArray from(int i) const { return SharedArray(data_ + i); }
  __device__ __forceinline__ T* data() const { return data_; }
  template <int N>
  __device__ __forceinline__ Pack<T, N> load(int i) const {
    return load_pack<N>(data_ + i);
  }
  template <int N>
  __device__ __forceinline__ void store(int i, const Pack<T, N>& pack) const {
    store_pack<N>(data_ + i, pack);
  }

 private:
  T* data_;
};

__device__ __forceinline__ std::byte* shared_begin() {
  extern __shared__ __align__(16) std::byte shared_memory[];
  return shared_memory;
}

#endif

/// Allocates the dynamic shared memory of a block, in the same order in all threads. The launch
/// must request at least what the kernel takes.
class SharedMemory {
 public:
  __device__ __forceinline__ SharedMemory() : next_(shared_begin()) {}
  /// Aligned to 16 bytes.
  template <typename T>
  __device__ __forceinline__ SharedArray<T> take(int count) {
    T* data = reinterpret_cast<T*>(next_);
    next_ += shared_bytes<T>(count);
    return SharedArray<T>(data);
  }
  /// Bytes that take<T>(count) uses up, for the launch.
  template <typename T>
  __host__ __device__ static constexpr int shared_bytes(int count) {
    return (static_cast<int>(sizeof(T)) * count + 15) / 16 * 16;
  }

 private:
  std::byte* next_;
};

}  // namespace tessera::kernels::cuda
