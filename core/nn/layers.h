#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/nn/module.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "core/ops/rotary.h"

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

class LoraAdapter;
struct LoraOptions;

/// y = x W + b over the last dim. Parameters: weight [out, in] (or [in, out], see the layout), bias
/// [out].
class Linear : public Module {
 public:
  Linear(Module& parent, std::string_view name, const LinearOptions& options);
  ~Linear() override;
  /// @param x         [..., in]
  /// @param residual  [..., out], added to the result; may be undefined
  /// @return          [..., out]
  Tensor operator()(const Tensor& x, const Tensor& residual = {}) const;
  /// The bias, or an undefined tensor.
  const Tensor& bias_or_none() const;
  std::int64_t inputs() const;
  std::int64_t outputs() const;

  /// Adds an adapter to outputs [first, first + count): a module of this one.
  /// @throws InvalidArgument on a range or a setting that does not fit
  void add_adapter(std::string_view name, std::int64_t first, std::int64_t count,
                   const LoraOptions& options);
  bool has_adapters() const;

  const ops::WeightLayout layout;
  Parameter weight;
  std::optional<Parameter> bias;

 private:
  std::vector<std::unique_ptr<LoraAdapter>> adapters_;
};

/// Layer norm has weight and bias, RMS norm a weight, and a plain RMS norm no parameter.
enum class NormKind : std::uint8_t { Layer, Rms, PlainRms };

struct NormOptions {
  NormKind kind = NormKind::Rms;
  double eps = 1e-6;
  double offset = 0.0;  ///< RMS norm: added to the weight, which then starts at 1 - offset
};

/// Norm over the last dim. Parameters: weight, bias [width], as the kind says.
class Norm : public Module {
 public:
  Norm(Module& parent, std::string_view name, std::int64_t width, const NormOptions& options);
  Tensor operator()(const Tensor& x) const;
  /// sum = x + residual and y = norm(sum), in one pass over memory.
  ops::SumAndNorm add(const Tensor& x, const Tensor& residual) const;

  const NormOptions options;
  std::optional<Parameter> weight, bias;
};

class LayerNorm : public Norm {
 public:
  LayerNorm(Module& parent, std::string_view name, std::int64_t width, double eps = 1e-5)
      : Norm(parent, name, width, {NormKind::Layer, eps}) {}
};

class RmsNorm : public Norm {
 public:
  RmsNorm(Module& parent, std::string_view name, std::int64_t width, double eps = 1e-6)
      : Norm(parent, name, width, {NormKind::Rms, eps}) {}
};

/// Zeroes elements with probability p and scales the others by 1 / (1 - p) while the model is
/// training. The mask depends on the module's path, the context's rng_step() and the sample, not on
/// how a batch is split over ranks and micro-batches.
class Dropout : public Module {
 public:
  Dropout(Module& parent, std::string_view name, float p);
  /// @param x  [B, ...]
  Tensor operator()(const Tensor& x) const;
  bool is_active() const { return p > 0 && training(); }

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

/// Norm of queries and keys.
struct QueryKeyNorm {
  enum class Over : std::uint8_t {
    None,
    Head,  ///< the numbers of a head, as in Qwen3 and Gemma 3
    All,   ///< those of all heads of a token, as in OLMo 2
  };
  Over over = Over::None;
  NormOptions norm{};
  bool after_rotary = false;  ///< else before it
};

struct AttentionOptions {
  std::int64_t width = 0, heads = 0;
  std::int64_t kv_heads = 0;    ///< 0: as many as heads; else divides them (grouped queries)
  std::int64_t head_dim = 0;    ///< 0: width / heads
  ops::RotaryOptions rotary{};  ///< none with a base of 0
  std::int64_t window = 0;      ///< tokens that a query sees, itself included; 0: all before it
  double softcap = 0;           ///< of scores; 0: none
  double scale = 0;             ///< of scores; 0: 1 / sqrt(head_dim)
  QueryKeyNorm qk_norm{};
  bool bias = true;  ///< of qkv
  bool out_bias = true;
  ops::WeightLayout layout = ops::WeightLayout::OutIn;
  Initialization init = kNormal, out_init = kNormal;
  AttentionNames names = {};
};

/// Causal self-attention with a packed projection of queries, keys and values.
/// Parameters: those of qkv, a Linear of width -> (heads + 2 kv_heads) head_dim, and of out, a
/// Linear of heads head_dim -> width; with qk_norm those of q_norm and k_norm.
class Attention : public Module {
 public:
  /// @throws InvalidArgument on sizes that do not divide one another
  Attention(Module& parent, std::string_view name, const AttentionOptions& options);
  /// @param x      [B, T, width]
  /// @param cache  for decoding: attends to the cached tokens too, and appends these; not
  ///   differentiable. Null: none
  /// @param documents  [B, T] i32, see ops::AttentionOptions; undefined: each row is one document
  /// @return       [B, T, width]
  Tensor operator()(const Tensor& x, KvCache* cache = nullptr, const Tensor& documents = {}) const;

 private:
  Tensor prepared(const Tensor& heads, const std::optional<Norm>& norm, std::int64_t past) const;
  AttentionOptions options_;  // all sizes set

 public:
  Linear qkv, out;
  std::optional<Norm> q_norm, k_norm;
};

enum class Activation : std::uint8_t {
  Gelu,         ///< in its tanh form
  ReluSquared,  ///< max(x, 0)^2; So et al. 2021, arXiv:2109.08668
};

struct MlpOptions {
  std::int64_t width = 0, hidden = 0;
  Activation activation = Activation::Gelu;  ///< of Mlp
  ops::Gate gate = ops::Gate::Silu;          ///< of GatedMlp
  bool bias = true;
  ops::WeightLayout layout = ops::WeightLayout::OutIn;
  Initialization init = kNormal, out_init = kNormal;
  MlpNames names = {};
};

/// down(activation(up(x))).
class Mlp : public Module {
 public:
  Mlp(Module& parent, std::string_view name, const MlpOptions& options);
  /// @param x         [..., width]
  /// @param residual  [..., width], added to the result; may be undefined
  Tensor operator()(const Tensor& x, const Tensor& residual = {}) const;

  Linear up, down;

 private:
  Activation activation_;
};

/// down(act(gate) * up) with gate and up from one packed projection.
class GatedMlp : public Module {
 public:
  GatedMlp(Module& parent, std::string_view name, const MlpOptions& options);
  /// @param x         [..., width]
  /// @param residual  [..., width], added to the result; may be undefined
  Tensor operator()(const Tensor& x, const Tensor& residual = {}) const;

  Linear up, down;  ///< up: [2 * hidden, width], gate first

 private:
  ops::Gate gate_;
};

}  // namespace tessera::nn
