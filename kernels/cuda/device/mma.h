#pragma once

#include "kernels/cuda/device/number.h"
#include "kernels/cuda/device/shared.h"

#if defined(TESSERA_FIBER)
#include <tensor_core.h>  // of tests/support/fiber
#endif

// bf16 tensor-core products, loads of their operands from shared memory, and asynchronous copies to
// it, for sm_80 and later. Fragment layouts are those of mma.sync.m16n8k16. All but the copies are
// operations of a full warp.
namespace tessera::kernels::cuda {

/// 16 x 16: a lane holds columns 2 t and 2 t + 1 of row g, of row g + 8, then the same of columns 8
/// to 15; g = lane / 4, t = lane % 4.
struct FragmentA {
  unsigned x[4];
};
/// 16 x 8: rows 2 t and 2 t + 1 of column g, then rows 2 t + 8 and 2 t + 9.
struct FragmentB {
  unsigned x[2];
};
/// 16 x 8 in f32: columns 2 t and 2 t + 1 of row g, then of row g + 8.
struct FragmentC {
  float x[4];
};

/// c += a b
__device__ __forceinline__ void mma(FragmentC& c, const FragmentA& a, const FragmentB& b) {
#if defined(TESSERA_FIBER)
  fiber::mma_m16n8k16_bf16(c.x, a.x, b.x, __FILE__, __LINE__);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
#endif
}

/// Loads four 8 x 8 matrices. Lane 8 i + r passes row r of matrix i, aligned to 16 bytes; each lane
/// receives elements 2 t and 2 t + 1 of row g of every matrix.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const SharedArray<BFloat16>& row) {
#if defined(TESSERA_FIBER)
  fiber::ldmatrix_x4(to, row.data(), false, __FILE__, __LINE__);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row.data())))
               : "memory");
#endif
}

/// The same for the transposed matrices: a lane receives elements 2 t and 2 t + 1 of column g.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4],
                                                         const SharedArray<BFloat16>& row) {
#if defined(TESSERA_FIBER)
  fiber::ldmatrix_x4(to, row.data(), true, __FILE__, __LINE__);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row.data())))
               : "memory");
#endif
}

/// Two numbers rounded to bf16, the first in the low half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
#if defined(TESSERA_FIBER)
  return narrow<BFloat16>(low).bits | static_cast<unsigned>(narrow<BFloat16>(high).bits) << 16;
#else
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

/// Starts to copy 16 bytes to shared memory, or to fill them with zeros without reading `from`.
/// Both addresses are aligned to 16 bytes.
template <typename T>
__device__ __forceinline__ void copy_async(const SharedArray<T>& to, const T* from, bool zeros) {
#if defined(TESSERA_FIBER)
  fiber::copy_async(to.data(), from, 16, zeros ? 0 : 16);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to.data()))),
               "l"(from), "r"(zeros ? 0 : 16)
               : "memory");
#endif
}

/// Makes a group of the copies that this thread started since the last call.
__device__ __forceinline__ void commit_copies() {
#if defined(TESSERA_FIBER)
  fiber::commit_copies();
#else
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

/// Waits until at most kGroups groups of this thread are in flight. Other threads see the copies
/// after a barrier.
template <int kGroups>
__device__ __forceinline__ void wait_copies() {
#if defined(TESSERA_FIBER)
  fiber::wait_copies(kGroups);
#else
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
#endif
}

}  // namespace tessera::kernels::cuda
