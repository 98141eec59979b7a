#pragma once

#include <algorithm>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/device/shared.h"
#include "kernels/cuda/device/unroll.h"
#include "kernels/cuda/launch/attention.h"

namespace tessera::kernels::cuda {

/// Operations on tiles in shared memory for attention of T (computed in A) on CUDA cores. 16 x 16 threads share a matrix
/// product: thread (y, x) computes rows y, y + 16, ... of columns x, x + 16, ..., or of packs x,
/// x + 16, ... if the columns are a head's. The 16 threads of a row are half a warp.
template <typename T, int kDim>
struct Plain : AttentionPlainShape<Compute<T>, kDim> {
  using A = Compute<T>;
  using Shape = AttentionPlainShape<A, kDim>;
  using Shape::kRows, Shape::kStride, Shape::kScoreStride, Shape::kTile, Shape::kScores;
  using Shape::kSide, Shape::kThreads;
  static constexpr int kPer = kRows / kSide;                      // rows per thread
  static constexpr int kWide = std::min(kPack<A>, kDim / kSide);  // columns of a head in one access
  static constexpr int kGroups = kDim / kSide / kWide;            // accesses per thread
  using Scores = A[kPer][kPer];
  using Sums = A[kPer][kGroups * kWide];
  using Shared = SharedArray<A>;

  const int y = static_cast<int>(threadIdx.x) / kSide, x = static_cast<int>(threadIdx.x) % kSide;

  /// Loads kRows rows of a head from row `first` on; rows from `rows` on, and columns from dim on,
  /// become zeros.
  __device__ __forceinline__ void load(const Shared& tile, const HeadsView<const T>& view,
                                       int batch, int first, int head, int rows, int dim) const {
    const T* const from = view.at(batch, first, head);
    constexpr int kWidth = kPack<A>, kPacks = kDim / kWidth;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kPacks; i += kThreads) {
      const int row = i / kPacks, column = i % kPacks * kWidth;
      const T* const at = from + row * view.token + column;
      Pack<A, kWidth> pack{};
      if (row < rows) {
        if (view.packs) {
          if (column < dim) {
            const Pack<T, kWidth> held = load_pack<kWidth>(at);
            TESSERA_UNROLL
            for (int k = 0; k < kWidth; ++k) pack[k] = widen(held[k]);
          }
        } else {
          TESSERA_UNROLL
          for (int k = 0; k < kWidth; ++k)
            if (column + k < dim) pack[k] = widen(at[k]);
        }
      }
      tile.template store<kWidth>(row * kStride + column, pack);
    }
  }

  /// scores = factor a b^T
  __device__ __forceinline__ void product_of_rows(Scores& scores, const Shared& a, const Shared& b,
                                                  A factor) const {
    constexpr int kWidth = kPack<A>;
    TESSERA_UNROLL
    for (int i = 0; i < kPer; ++i) {
      TESSERA_UNROLL
      for (int j = 0; j < kPer; ++j) scores[i][j] = 0;
    }
    for (int d = 0; d < kDim; d += kWidth) {
      Pack<A, kWidth> left[kPer];
      TESSERA_UNROLL
      for (int i = 0; i < kPer; ++i)
        left[i] = a.template load<kWidth>((y + i * kSide) * kStride + d);
      TESSERA_UNROLL
      for (int j = 0; j < kPer; ++j) {
        const auto right = b.template load<kWidth>((x + j * kSide) * kStride + d);
        TESSERA_UNROLL
        for (int i = 0; i < kPer; ++i) {
          TESSERA_UNROLL
          for (int k = 0; k < kWidth; ++k) scores[i][j] += left[i][k] * right[k];
        }
      }
    }
    TESSERA_UNROLL
    for (int i = 0; i < kPer; ++i) {
      TESSERA_UNROLL
      for (int j = 0; j < kPer; ++j) scores[i][j] *= factor;
    }
  }

  __device__ __forceinline__ void put(const Shared& to, const Scores& scores) const {
    TESSERA_UNROLL
    for (int i = 0; i < kPer; ++i) {
      TESSERA_UNROLL
      for (int j = 0; j < kPer; ++j)
        to[(y + i * kSide) * kScoreStride + x + j * kSide] = scores[i][j];
    }
  }

  /// sums += w b, or w^T b if kTransposed, where w is kRows x kRows.
  template <bool kTransposed>
  __device__ __forceinline__ void add_weighted_rows(Sums& sums, const Shared& w,
                                                    const Shared& b) const {
    for (int k = 0; k < kRows; ++k) {
      A left[kPer];
      TESSERA_UNROLL
      for (int i = 0; i < kPer; ++i) {
        const int row = y + i * kSide;
        left[i] = w[kTransposed ? k * kScoreStride + row : row * kScoreStride + k];
      }
      TESSERA_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        const auto right = b.template load<kWide>(k * kStride + (g * kSide + x) * kWide);
        TESSERA_UNROLL
        for (int i = 0; i < kPer; ++i) {
          TESSERA_UNROLL
          for (int c = 0; c < kWide; ++c) sums[i][g * kWide + c] += left[i] * right[c];
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Sums& sums, A factor, const HeadsView<T>& view,
                                        int batch, int first, int head, int rows, int dim,
                                        bool accumulate) const {
    T* const to = view.at(batch, first, head);
    TESSERA_UNROLL
    for (int i = 0; i < kPer; ++i) {
      TESSERA_UNROLL
      for (int c = 0; c < kGroups * kWide; ++c) {
        const int row = y + i * kSide, column = (c / kWide * kSide + x) * kWide + c % kWide;
        if (row >= rows || column >= dim) continue;
        T& at = to[row * view.token + column];
        at = narrow<T>(sums[i][c] * factor + (accumulate ? widen(at) : A(0)));
      }
    }
  }
};

}  // namespace tessera::kernels::cuda
