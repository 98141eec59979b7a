#pragma once

#include <cmath>
#include <type_traits>

#include "core/base/dtype.h"
#include "kernels/cuda/device/platform.h"

namespace tessera::kernels::cuda {

/// Type of arithmetic: double for double, else float.
template <typename T>
using Compute = Accumulator<T>;

__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(BFloat16 x) {
#if defined(__CUDA_ARCH__)
  float result;  // one instruction also for the upper half of a register
  asm("mov.b32 %0, {%1, %2};" : "=f"(result) : "n"(0), "h"(x.bits));
  return result;
#else
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
#endif
}

template <typename T>
__device__ __forceinline__ T narrow(Compute<T> x);
template <>
__device__ __forceinline__ double narrow<double>(double x) {
  return x;
}
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
/// Rounds to nearest, ties to even; NaN stays NaN.
template <>
__device__ __forceinline__ BFloat16 narrow<BFloat16>(float x) {
  BFloat16 result;
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
  const unsigned u = __float_as_uint(x);
  const unsigned rounded = (u + 0x7fffU + ((u >> 16) & 1U)) >> 16;
  result.bits =
      static_cast<unsigned short>((u & 0x7fffffffU) > 0x7f800000U ? (u >> 16) | 0x40U : rounded);
#endif
  return result;
}

inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kLn2 = 0.69314718055994530942F;

/// 2^x with an error of at most 2 ulp; 0 instead of denormals.
__device__ __forceinline__ float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

/// N elements moved at once: at most 16 bytes, aligned to their size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(sizeof(T) * N <= 16);
  T values[N];
  __device__ __forceinline__ T& operator[](int i) { return values[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return values[i]; }
};
/// Elements that a thread moves at once. 1 for f64, which only tests and gradient checks use.
template <typename T>
inline constexpr int kPack = sizeof(T) > 4 ? 1 : 16 / static_cast<int>(sizeof(T));

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <int N, typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

/// Rounds each value as narrow() does, two at a time.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> narrow_pack(const Compute<T> (&values)[N]) {
#if defined(__CUDA_ARCH__)
  constexpr bool kPairs = std::is_same_v<T, BFloat16> && N % 2 == 0;
#else
  constexpr bool kPairs = false;
#endif
  Pack<T, N> pack;
  if constexpr (kPairs) {
    for (int k = 0; k < N; k += 2)
      asm("{.reg .b32 pair; cvt.rn.bf16x2.f32 pair, %3, %2; mov.b32 {%0, %1}, pair;}"
          : "=h"(pack[k].bits), "=h"(pack[k + 1].bits)
          : "f"(values[k]), "f"(values[k + 1]));
  } else {
    for (int k = 0; k < N; ++k) pack[k] = narrow<T>(values[k]);
  }
  return pack;
}

}  // namespace tessera::kernels::cuda
