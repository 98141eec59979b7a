#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/nn/module.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"

namespace tessera::nn {

/// Normal distribution with standard deviation 0.02, the usual initialization of decoders.
inline constexpr Initialization kNormal{Initialization::Kind::Normal, 0.02F};

/// A table of vectors. Parameter: weight [count, width].
class Embedding : public Module {
 public:
  Embedding(Module& parent, std::string_view name, std::int64_t count, std::int64_t width,
            Initialization init = kNormal);
  /// @param ids  [B, T] i32, in [0, count)
  /// @return     [B, T, width]
  Tensor operator()(const Tensor& ids) const;

  Parameter weight;
};

struct LinearOptions {
  std::int64_t in = 0, out = 0;
  bool bias = true;
  ops::WeightLayout layout = ops::WeightLayout::OutIn;
  Initialization init = kNormal;
};

/// y = x W + b over the last dim. Parameters: weight [out, in] (or [in, out], see the layout), bias
/// [out].
class Linear : public Module {
 public:
  Linear(Module& parent, std::string_view name, const LinearOptions& options);
  /// @param x  [..., in]
  /// @return   [..., out]
  Tensor operator()(const Tensor& x) const;
  /// The bias, or an undefined tensor.
  const Tensor& bias_or_none() const;

  const ops::WeightLayout layout;
  Parameter weight;
  std::optional<Parameter> bias;
};

/// Layer norm over the last dim. Parameters: weight, bias [width].
class LayerNorm : public Module {
 public:
  LayerNorm(Module& parent, std::string_view name, std::int64_t width, double eps = 1e-5);
  Tensor operator()(const Tensor& x) const;
  /// sum = x + residual and y = norm(sum), in one pass over memory.
  ops::SumAndNorm add(const Tensor& x, const Tensor& residual) const;

  const double eps;
  Parameter weight, bias;
};

/// Root-mean-square norm over the last dim. Parameter: weight [width].
class RmsNorm : public Module {
 public:
  RmsNorm(Module& parent, std::string_view name, std::int64_t width, double eps = 1e-6);
  Tensor operator()(const Tensor& x) const;
  ops::SumAndNorm add(const Tensor& x, const Tensor& residual) const;

  const double eps;
  Parameter weight;
};

/// Zeroes elements with probability p and scales the others by 1 / (1 - p) while the model is
/// training. The mask depends on the module's path, the context's rng_step() and the sample, not on
/// how a batch is split over ranks and micro-batches.
class Dropout : public Module {
 public:
  Dropout(Module& parent, std::string_view name, float p);
  /// @param x  [B, ...]
  Tensor operator()(const Tensor& x) const;

  const float p;
};

/// Keys and values of the tokens seen so far, for decoding; those of a layer are allocated when it
/// first uses the cache.
class KvCache {
 public:
  struct Layer {
    Tensor k, v;  ///< [B, capacity, kv_heads, head_dim]
  };
  explicit KvCache(std::int64_t capacity);
  /// The layer of an attention module, undefined tensors at first.
  /// The next call may move it.
  Layer& layer(const Module& attention);
  /// Most tokens per row.
  std::int64_t capacity() const { return capacity_; }

  std::int64_t past = 0;  ///< filled positions; whoever runs the whole model advances it

 private:
  std::int64_t capacity_;
  std::vector<std::pair<const Module*, Layer>> layers_;
};

/// Names of a layer's linear maps, which differ between model families.
struct AttentionNames {
  std::string_view qkv = "qkv", out = "out";
};
struct MlpNames {
  std::string_view up = "up", down = "down";
};

/// Norm of each head's queries and keys.
enum class HeadNorm : std::uint8_t { None, Rms, Layer };

struct AttentionOptions {
  std::int64_t width = 0, heads = 0;
  std::int64_t kv_heads = 0;  ///< 0: as many as heads; else divides them (grouped queries)
  std::int64_t head_dim = 0;  ///< 0: width / heads
  double rotary_base = 0;     ///< 0: no rotary position embedding
  std::int64_t window = 0;    ///< tokens that a query sees, itself included; 0: all before it
  double softcap = 0;         ///< of scores; 0: none
  double scale = 0;           ///< of scores; 0: 1 / sqrt(head_dim)
  HeadNorm qk_norm = HeadNorm::None;  ///< before the rotary embedding, as in Qwen3 and Gemma 3
  double qk_norm_eps = 1e-6;
  bool bias = true;
  ops::WeightLayout layout = ops::WeightLayout::OutIn;
  Initialization init = kNormal, out_init = kNormal;
  AttentionNames names = {};
};

/// Causal self-attention with a packed projection of queries, keys and values.
/// Parameters: those of qkv, a Linear of width -> (heads + 2 kv_heads) head_dim, and of out, a
/// Linear of heads head_dim -> width; with qk_norm those of q_norm and k_norm, norms of head_dim.
class Attention : public Module {
 public:
  /// @throws InvalidArgument on sizes that do not divide one another
  Attention(Module& parent, std::string_view name, const AttentionOptions& options);
  /// @param x      [B, T, width]
  /// @param cache  for decoding: attends to the cached tokens too, and appends these; not
  ///   differentiable. Null: none
  /// @return       [B, T, width]
  Tensor operator()(const Tensor& x, KvCache* cache = nullptr) const;

 private:
  struct Norm {
    std::optional<RmsNorm> rms;
    std::optional<LayerNorm> layer;
  };
  AttentionOptions options_;  // all sizes set

 public:
  Linear qkv, out;

 private:
  Norm q_norm_, k_norm_;
};

struct MlpOptions {
  std::int64_t width = 0, hidden = 0;
  bool bias = true;
  ops::WeightLayout layout = ops::WeightLayout::OutIn;
  Initialization init = kNormal, out_init = kNormal;
  MlpNames names = {};
};

/// down(gelu(up(x))), with the tanh form of GELU.
class Mlp : public Module {
 public:
  Mlp(Module& parent, std::string_view name, const MlpOptions& options);
  /// @param x  [..., width]
  Tensor operator()(const Tensor& x) const;

  Linear up, down;
};

/// down(silu(gate) * up) with gate and up from one packed projection.
class GatedMlp : public Module {
 public:
  GatedMlp(Module& parent, std::string_view name, const MlpOptions& options);
  /// @param x  [..., width]
  Tensor operator()(const Tensor& x) const;

  Linear up, down;  ///< up: [2 * hidden, width], gate first
};

}  // namespace tessera::nn
