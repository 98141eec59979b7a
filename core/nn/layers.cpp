#include "core/nn/layers.h"

#include "core/base/rng.h"
#include "core/nn/lora.h"
#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/rotary.h"
#include "core/ops/shape.h"
#include "core/ops/unary.h"
#include "core/ops/view.h"

namespace tessera::nn {
namespace {

constexpr Initialization kZeros{Initialization::Kind::Zeros};
constexpr Initialization kOnes{Initialization::Kind::Ones};

Shape weight_shape(const LinearOptions& o) {
  return o.layout == ops::WeightLayout::OutIn ? Shape{o.out, o.in} : Shape{o.in, o.out};
}

// Undefined without a parameter.
const Tensor& tensor_of(const std::optional<Parameter>& parameter) {
  static const Tensor kNone;
  return parameter ? parameter->tensor : kNone;
}

}  // namespace

Embedding::Embedding(Module& parent, std::string_view name, std::int64_t count, std::int64_t width,
                     Initialization init)
    : Module(parent, name), weight(*this, "weight", {count, width}, init) {}

Tensor Embedding::operator()(const Tensor& ids) const { return ops::embedding(ids, weight, {}); }

Linear::Linear(Module& parent, std::string_view name, const LinearOptions& options)
    : Module(parent, name),
      layout(options.layout),
      weight(*this, "weight", weight_shape(options), options.init) {
  weight.is_matrix = true;
  if (options.bias) bias.emplace(*this, "bias", Shape{options.out}, kZeros);
}

const Tensor& Linear::bias_or_none() const { return tensor_of(bias); }

Linear::~Linear() = default;

bool Linear::has_adapters() const { return !adapters_.empty(); }

std::int64_t Linear::inputs() const {
  return weight.tensor.shape()[layout == ops::WeightLayout::OutIn ? 1 : 0];
}

std::int64_t Linear::outputs() const {
  return weight.tensor.shape()[layout == ops::WeightLayout::OutIn ? 0 : 1];
}

void Linear::add_adapter(std::string_view name, std::int64_t first, std::int64_t count,
                         const LoraOptions& options) {
  require(first >= 0 && count >= 1 && first <= outputs() - count,
          "layer '{}' has outputs 0 to {}, and adapter '{}' is for {} to {}", path(), outputs() - 1,
          name, first, first + count - 1);
  // Before there is a module, because a constructor that throws would leave it in the tree.
  require(options.rank >= 1, "the rank of adapter '{}' of layer '{}' must be 1 or more, got {}",
          name, path(), options.rank);
  require(options.dropout >= 0 && options.dropout < 1,
          "the dropout of adapter '{}' of layer '{}' must be in [0, 1), got {}", name, path(),
          options.dropout);
  adapters_.push_back(std::make_unique<LoraAdapter>(*this, name, first, count, options));
}

Tensor Linear::operator()(const Tensor& x, const Tensor& residual) const {
  std::vector<ops::LowRankTerm> terms;
  for (const auto& adapter : adapters_) terms.push_back(adapter->term(x));
  if (terms.empty()) return ops::linear(x, weight, bias_or_none(), layout, {}, residual);
  // A term is small beside the residual, and is added in the result's dtype.
  const Tensor y = ops::linear(x, weight, bias_or_none(), layout, terms);
  return residual.defined() ? ops::add(residual, y) : y;
}

Norm::Norm(Module& parent, std::string_view name, std::int64_t width, const NormOptions& o)
    : Module(parent, name), options(o) {
  require(o.offset == 0.0 || o.offset == 1.0, "norm '{}': the weight's offset is 0 or 1, got {}",
          path(), o.offset);
  if (o.kind != NormKind::PlainRms)
    weight.emplace(*this, "weight", Shape{width}, o.offset == 0.0 ? kOnes : kZeros);
  if (o.kind == NormKind::Layer) bias.emplace(*this, "bias", Shape{width}, kZeros);
}

Tensor Norm::operator()(const Tensor& x) const {
  if (options.kind == NormKind::Layer) return ops::layer_norm(x, *weight, *bias, options.eps);
  return ops::rms_norm(x, tensor_of(weight), options.eps, options.offset);
}

ops::SumAndNorm Norm::add(const Tensor& x, const Tensor& residual) const {
  if (options.kind == NormKind::Layer)
    return ops::add_layer_norm(x, residual, *weight, *bias, options.eps);
  return ops::add_rms_norm(x, residual, tensor_of(weight), options.eps, options.offset);
}

Dropout::Dropout(Module& parent, std::string_view name, float probability)
    : Module(parent, name), p(probability) {}

Tensor Dropout::operator()(const Tensor& x) const {
  return training() ? ops::dropout(x, p, hash_text(path())) : x;
}

namespace {

AttentionOptions completed(AttentionOptions o, const std::string& path) {
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  require(o.heads >= 1 && o.kv_heads >= 1 && o.heads % o.kv_heads == 0,
          "attention '{}': {} heads can't share {} heads of keys and values", path, o.heads,
          o.kv_heads);
  require(o.head_dim > 0 || o.width % o.heads == 0,
          "attention '{}': width {} is not divisible by {} heads", path, o.width, o.heads);
  if (o.head_dim == 0) o.head_dim = o.width / o.heads;
  return o;
}

}  // namespace

Attention::Attention(Module& parent, std::string_view name, const AttentionOptions& o)
    : Module(parent, name),
      options_(completed(o, path())),
      qkv(*this, o.names.qkv,
          {o.width, (options_.heads + 2 * options_.kv_heads) * options_.head_dim, o.bias, o.layout,
           o.init}),
      out(*this, o.names.out,
          {options_.heads * options_.head_dim, o.width, o.out_bias, o.layout, o.out_init}) {
  using Over = QueryKeyNorm::Over;
  const auto make = [&](std::optional<Norm>& norm, std::string_view norm_name, std::int64_t heads) {
    if (o.qk_norm.over == Over::None) return;
    const std::int64_t count = o.qk_norm.over == Over::All ? heads : 1;
    norm.emplace(*this, norm_name, count * options_.head_dim, o.qk_norm.norm);
  };
  make(q_norm, "q_norm", options_.heads);
  make(k_norm, "k_norm", options_.kv_heads);
}

KvCache::KvCache(std::int64_t capacity) : capacity_(capacity) {}

KvCache::Layer& KvCache::layer(const Module& attention) {
  for (auto& [module, layer] : layers_)
    if (module == &attention) return layer;
  return layers_.emplace_back(&attention, Layer{}).second;
}

Tensor Attention::operator()(const Tensor& x, KvCache* cache, const Tensor& documents) const {
  const AttentionOptions& o = options_;
  const ops::AttentionOptions attention{.heads = o.heads,
                                        .kv_heads = o.kv_heads,
                                        .window = o.window,
                                        .softcap = o.softcap,
                                        .scale = o.scale,
                                        .documents = documents};
  const std::int64_t past = cache == nullptr ? 0 : cache->past;
  KvCache::Layer* const layer = cache == nullptr ? nullptr : &cache->layer(*this);
  if (layer != nullptr && !layer->k.defined()) {
    for (Tensor* t : {&layer->k, &layer->v})
      *t = Tensor::empty(x.context(), {x.dim(0), cache->capacity(), o.kv_heads, o.head_dim},
                         x.dtype(), MemoryCategory::Activations, "kv cache");
  }
  Tensor packed = qkv(x);
  if (!q_norm) {
    if (o.rotary.base > 0) packed = ops::rotary_packed(packed, o.heads, o.kv_heads, o.rotary, past);
    return out(layer == nullptr
                   ? ops::attention(packed, attention)
                   : ops::cached_attention(packed, attention, layer->k, layer->v, past));
  }
  const std::int64_t q_width = o.heads * o.head_dim, kv_width = o.kv_heads * o.head_dim;
  const std::vector<Tensor> parts = ops::split(packed, {q_width, kv_width, kv_width}, -1);
  const Tensor q = prepared(parts[0], q_norm, past), k = prepared(parts[1], k_norm, past);
  const Tensor v = ops::reshape(parts[2], {x.dim(0), x.dim(1), o.kv_heads, o.head_dim});
  return out(layer == nullptr
                 ? ops::attention(q, k, v, attention)
                 : ops::cached_attention(q, k, v, attention, layer->k, layer->v, past));
}

// Queries or keys [B, T, heads * head_dim], normed and rotated, as [B, T, heads, head_dim].
Tensor Attention::prepared(const Tensor& rows, const std::optional<Norm>& norm,
                           std::int64_t past) const {
  const AttentionOptions& o = options_;
  const Shape by_heads{rows.dim(0), rows.dim(1), rows.dim(2) / o.head_dim, o.head_dim};
  const auto normed = [&](const Tensor& x) {
    const bool all = o.qk_norm.over == QueryKeyNorm::Over::All;
    return ops::reshape((*norm)(ops::reshape(x, all ? rows.shape() : by_heads)), by_heads);
  };
  Tensor x = o.qk_norm.after_rotary ? ops::reshape(rows, by_heads) : normed(rows);
  if (o.rotary.base > 0) x = ops::rotary(x, o.rotary, past);
  return o.qk_norm.after_rotary ? normed(x) : x;
}

Mlp::Mlp(Module& parent, std::string_view name, const MlpOptions& o)
    : Module(parent, name),
      up(*this, o.names.up, {o.width, o.hidden, o.bias, o.layout, o.init}),
      down(*this, o.names.down, {o.hidden, o.width, o.bias, o.layout, o.out_init}),
      activation_(o.activation) {}

Tensor Mlp::operator()(const Tensor& x, const Tensor& residual) const {
  return recompute_mlp(*this, {x, residual}, [this](std::span<const Tensor> in) {
    if (activation_ == Activation::ReluSquared) {
      const Tensor h = ops::relu(up(in[0]));
      return down(h * h, in[1]);
    }
    if (up.has_adapters() || down.has_adapters()) return down(ops::gelu(up(in[0])), in[1]);
    return ops::gelu_mlp(in[0], up.weight, up.bias_or_none(), down.weight, down.bias_or_none(),
                         up.layout, in[1]);
  });
}

GatedMlp::GatedMlp(Module& parent, std::string_view name, const MlpOptions& o)
    : Module(parent, name),
      up(*this, o.names.up, {o.width, 2 * o.hidden, o.bias, o.layout, o.init}),
      down(*this, o.names.down, {o.hidden, o.width, o.bias, o.layout, o.out_init}),
      gate_(o.gate) {}

Tensor GatedMlp::operator()(const Tensor& x, const Tensor& residual) const {
  return recompute_mlp(*this, {x, residual}, [this](std::span<const Tensor> in) {
    const Tensor h = up(in[0]);
    if (down.has_adapters())
      return down(gate_ == ops::Gate::Silu ? ops::swiglu(h) : ops::geglu(h), in[1]);
    return ops::gated_linear(h, down.weight, down.bias_or_none(), down.layout, gate_, in[1]);
  });
}

}  // namespace tessera::nn
