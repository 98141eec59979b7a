#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numbers>
#include <type_traits>

#include "tests/support/fiber/fiber.h"

// CUDA's language extensions for kernels that are compiled as plain C++ and run as fibers.
// Semantics as in the CUDA C++ Programming Guide.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define threadIdx (::tessera::fiber::place().thread)
#define blockIdx (::tessera::fiber::place().block)
#define blockDim (::tessera::fiber::place().block_dim)
#define gridDim (::tessera::fiber::place().grid_dim)

#define __syncthreads() ::tessera::fiber::sync_block(__FILE__, __LINE__)

namespace tessera::fiber {

template <typename T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t) && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T shuffle(std::uint32_t mask, T value, int source, const char* file, int line) {
  return from_bits<T>(exchange(mask, to_bits(value), source, file, line));
}

}  // namespace tessera::fiber

#define __syncwarp(mask) ::tessera::fiber::sync_warp(mask, __FILE__, __LINE__)
#define __shfl_xor_sync(mask, value, lanes) \
  ::tessera::fiber::shuffle(mask, value, ::tessera::fiber::lane() ^ (lanes), __FILE__, __LINE__)
#define __shfl_down_sync(mask, value, lanes) \
  ::tessera::fiber::shuffle(mask, value, ::tessera::fiber::lane() + (lanes), __FILE__, __LINE__)
#define __shfl_up_sync(mask, value, lanes) \
  ::tessera::fiber::shuffle(mask, value, ::tessera::fiber::lane() - (lanes), __FILE__, __LINE__)
#define __ballot_sync(mask, value) ::tessera::fiber::ballot(mask, value, __FILE__, __LINE__)

inline void sincospi(double x, double* sine, double* cosine) {
  *sine = std::sin(std::numbers::pi * x);
  *cosine = std::cos(std::numbers::pi * x);
}
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = static_cast<float>(std::sin(std::numbers::pi * static_cast<double>(x)));
  *cosine = static_cast<float>(std::cos(std::numbers::pi * static_cast<double>(x)));
}
inline int __popc(std::uint32_t x) { return std::popcount(x); }
inline int __ffs(std::uint32_t x) { return x == 0 ? 0 : std::countr_zero(x) + 1; }
inline std::uint32_t __float_as_uint(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float __uint_as_float(std::uint32_t x) { return std::bit_cast<float>(x); }
