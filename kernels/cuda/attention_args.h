#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/device/number.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch/attention.h"

// Arguments of the attention kernels, and the tile that a block computes.
namespace tessera::kernels::cuda {

/// A [B, T, H, D] window with contiguous heads.
template <typename T>
struct HeadsView {
  T* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0;  ///< strides, in elements
  bool packs = false;                           ///< each head is made of aligned packs of 16 bytes

  HeadsView() = default;
  explicit HeadsView(const TensorView& view)
      : data(static_cast<T*>(view.data)),
        batch(view.strides[0]),
        token(view.strides[1]),
        head(view.strides[2]) {
    constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
    const auto whole = [&](int dim) {
      return view.shape[dim] <= 1 || view.strides[dim] % kWidth == 0;
    };
    packs = is_aligned(data) && view.shape[3] % kWidth == 0 && whole(0) && whole(1) && whole(2);
  }

  __device__ __forceinline__ T* at(std::int64_t b, std::int64_t t, std::int64_t h) const {
    return data + b * batch + t * token + h * head;
  }
};

/// A gradient; data is null if it is not needed.
template <typename T>
struct GradientHeads : HeadsView<T> {
  bool accumulate = false;
  GradientHeads() = default;
  explicit GradientHeads(const GradientView& gradient)
      : HeadsView<T>(gradient ? HeadsView<T>(gradient.view) : HeadsView<T>()),
        accumulate(gradient.accumulate) {}
};

/// Sizes as ints; kernels/cuda/attention.cu checks that they fit.
struct AttentionSizes {
  int batch, queries, keys, heads, kv_heads, dim;
  AttentionSizes(const TensorView& q, const TensorView& k)
      : batch(static_cast<int>(q.shape[0])),
        queries(static_cast<int>(q.shape[1])),
        keys(static_cast<int>(k.shape[1])),
        heads(static_cast<int>(q.shape[2])),
        kv_heads(static_cast<int>(k.shape[2])),
        dim(static_cast<int>(q.shape[3])) {}
  /// Query i sees the keys up to i + past().
  __host__ __device__ int past() const { return keys - queries; }
  __host__ __device__ int group() const { return heads / kv_heads; }
};

template <typename T>
struct AttentionForwardArgs {
  AttentionSizes sizes;
  HeadsView<const T> q, k, v;
  HeadsView<T> out;
  Compute<T>* log_sum_exp;  // [B, H, Tq], or null
  Compute<T> scale;

  explicit AttentionForwardArgs(const AttentionForward& args)
      : sizes(args.q, args.k),
        q(args.q),
        k(args.k),
        v(args.v),
        out(args.out),
        log_sum_exp(static_cast<Compute<T>*>(args.log_sum_exp.data)),
        scale(static_cast<Compute<T>>(args.scale)) {}
};

template <typename T>
struct AttentionBackwardArgs {
  AttentionSizes sizes;
  HeadsView<const T> q, k, v, out, grad_out;
  GradientHeads<T> grad_q, grad_k, grad_v;
  const Compute<T>* log_sum_exp;  // [B, H, Tq]
  Compute<T>* delta;              // [B, H, Tq]: sums of grad_out * out over a head
  Compute<T> scale;

  AttentionBackwardArgs(const AttentionBackward& args, Compute<T>* deltas)
      : sizes(args.q, args.k),
        q(args.q),
        k(args.k),
        v(args.v),
        out(args.out),
        grad_out(args.grad_out),
        grad_q(args.grad_q),
        grad_k(args.grad_k),
        grad_v(args.grad_v),
        log_sum_exp(static_cast<const Compute<T>*>(args.log_sum_exp.data)),
        delta(deltas),
        scale(static_cast<Compute<T>>(args.scale)) {}
};

/// The tile of a block. The one-dimensional grid goes head by head, so that tiles that share keys
/// and values run together and find them in the L2 cache. Tiles with the most work come first.
struct AttentionPlace {
  int tile, head, batch;
  __device__ __forceinline__ AttentionPlace(int tiles, int heads, bool last_first) {
    const int block = static_cast<int>(blockIdx.x);
    const int of_head = block / tiles;
    tile = block % tiles;
    if (last_first) tile = tiles - 1 - tile;
    head = of_head % heads;
    batch = of_head / heads;
  }
};
inline int divide_up(int n, int by) { return (n + by - 1) / by; }

// On tensor cores: attention_bf16_forward.cu, attention_bf16_backward.cu.
void attention_forward_bf16(Context& context, const AttentionForwardArgs<BFloat16>& args);
void attention_backward_bf16(Context& context, const AttentionBackwardArgs<BFloat16>& args);
/// Shared memory that a block of backward needs, in bytes.
int attention_backward_bf16_shared_bytes(std::int64_t head_dim);

// On CUDA cores, plain causal attention of float and double: attention_plain.cu.
template <typename T>
void attention_forward_plain(Context& context, const AttentionForwardArgs<T>& args);
template <typename T>
void attention_backward_plain(Context& context, const AttentionBackwardArgs<T>& args);

// On CUDA cores, all variants and dtypes: attention_variant.cu.
template <typename T>
void attention_forward_variant(Context& context, const AttentionForwardArgs<T>& args,
                               const AttentionVariant& variant);
template <typename T>
void attention_backward_variant(Context& context, const AttentionBackwardArgs<T>& args,
                                const AttentionVariant& variant);

}  // namespace tessera::kernels::cuda
