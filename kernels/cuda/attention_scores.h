#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/device/reduce.h"

// Masks and caps of scores for the kernels on CUDA cores: one class for plain causal attention and
// one for all other variants. Query i stands at the position of key i + past().
namespace tessera::kernels::cuda {

/// Plain causal attention: query i sees keys [0, i + past()].
struct CausalScores {
  static constexpr bool kCaps = false;

  /// Keys outside of [first_key, end_key) are seen by no query in [query, query + count).
  __device__ __forceinline__ int first_key(const AttentionSizes&, int /*query*/) const { return 0; }
  __device__ __forceinline__ int end_key(const AttentionSizes& sizes, int query, int count) const {
    return query + count + sizes.past();
  }
  /// Queries outside of [first_query, end_query) see no key in [key, key + count).
  __device__ __forceinline__ int first_query(const AttentionSizes& sizes, int key) const {
    return std::max(0, key - sizes.past());
  }
  __device__ __forceinline__ int end_query(const AttentionSizes& sizes, int /*key*/,
                                           int /*count*/) const {
    return sizes.queries;
  }
  /// True if no query of a tile sees a key of another; the same for all threads of a block. Tiles
  /// have at most kWarpSize rows.
  __device__ __forceinline__ bool skips(const AttentionSizes&, int /*batch*/, int /*query*/,
                                        int /*queries*/, int /*key*/, int /*keys*/) const {
    return false;
  }
  /// For rows beyond the last query, any result.
  __device__ __forceinline__ bool sees(const AttentionSizes& sizes, int /*batch*/, int query,
                                       int key) const {
    return key <= query + sizes.past();
  }
};

/// Any variant, with the same functions.
struct VariantScores {
  static constexpr bool kCaps = true;

  explicit VariantScores(const AttentionVariant& variant, const AttentionSizes& sizes)
      : causal(variant.causal),
        window(static_cast<int>(std::min<std::int64_t>(variant.window, sizes.keys))),
        softcap(variant.softcap),
        documents(static_cast<const std::int32_t*>(variant.documents.data)),
        stride(documents == nullptr ? 0 : variant.documents.strides[0]) {}

  __device__ __forceinline__ int first_key(const AttentionSizes& sizes, int query) const {
    return window > 0 ? std::max(0, query + sizes.past() - window + 1) : 0;
  }
  __device__ __forceinline__ int end_key(const AttentionSizes& sizes, int query, int count) const {
    return causal ? query + count + sizes.past() : sizes.keys;
  }
  __device__ __forceinline__ int first_query(const AttentionSizes& sizes, int key) const {
    return causal ? std::max(0, key - sizes.past()) : 0;
  }
  __device__ __forceinline__ int end_query(const AttentionSizes& sizes, int key, int count) const {
    return window > 0 ? std::min(sizes.queries, key + count - 1 + window - sizes.past())
                      : sizes.queries;
  }
  /// Compares ranges of ids, which is exact for the ascending ids of packed documents.
  __device__ __forceinline__ bool skips(const AttentionSizes& sizes, int batch, int query,
                                        int queries, int key, int keys) const {
    if (documents == nullptr) return false;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const std::int32_t* const ids = documents + batch * stride;
    const std::int32_t own = ids[query + sizes.past() + std::min(lane, queries - 1)];
    const std::int32_t other = ids[key + std::min(lane, keys - 1)];
    const auto least = [](std::int32_t a, std::int32_t b) { return a < b ? a : b; };
    const auto most = [](std::int32_t a, std::int32_t b) { return a > b ? a : b; };
    return warp_reduce(own, most) < warp_reduce(other, least) ||
           warp_reduce(own, least) > warp_reduce(other, most);
  }
  __device__ __forceinline__ bool sees(const AttentionSizes& sizes, int batch, int query,
                                       int key) const {
    const int position = std::min(query, sizes.queries - 1) + sizes.past();
    if (key >= sizes.keys || (causal && key > position) || (window > 0 && key <= position - window))
      return false;
    if (documents == nullptr) return true;
    const std::int32_t* const ids = documents + batch * stride;
    return ids[key] == ids[position];
  }

  template <typename A>
  __device__ __forceinline__ A cap(A score) const {
    return softcap > 0 ? A(softcap) * std::tanh(score / A(softcap)) : score;
  }
  /// Derivative of cap() where its result is `capped`.
  template <typename A>
  __device__ __forceinline__ A slope(A capped) const {
    const A ratio = softcap > 0 ? capped / A(softcap) : A(0);
    return A(1) - ratio * ratio;
  }

  bool causal;
  int window;     // 0: none
  float softcap;  // 0: none
  const std::int32_t* documents;
  std::int64_t stride;  // of documents, between sequences
};

}  // namespace tessera::kernels::cuda
