#include "core/nn/layers.h"

#include "core/base/rng.h"
#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/rotary.h"
#include "core/ops/shape.h"
#include "core/ops/view.h"

namespace tessera::nn {
namespace {

constexpr Initialization kZeros{Initialization::Kind::Zeros};
constexpr Initialization kOnes{Initialization::Kind::Ones};

Shape weight_shape(const LinearOptions& o) {
  return o.layout == ops::WeightLayout::OutIn ? Shape{o.out, o.in} : Shape{o.in, o.out};
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
  if (options.bias) bias.emplace(*this, "bias", Shape{options.out}, kZeros);
}

const Tensor& Linear::bias_or_none() const {
  static const Tensor kNone;
  return bias ? bias->tensor : kNone;
}

Tensor Linear::operator()(const Tensor& x) const {
  return ops::linear(x, weight, bias_or_none(), layout);
}

LayerNorm::LayerNorm(Module& parent, std::string_view name, std::int64_t width, double epsilon)
    : Module(parent, name),
      eps(epsilon),
      weight(*this, "weight", {width}, kOnes),
      bias(*this, "bias", {width}, kZeros) {}

Tensor LayerNorm::operator()(const Tensor& x) const {
  return ops::layer_norm(x, weight, bias, eps);
}

ops::SumAndNorm LayerNorm::add(const Tensor& x, const Tensor& residual) const {
  return ops::add_layer_norm(x, residual, weight, bias, eps);
}

RmsNorm::RmsNorm(Module& parent, std::string_view name, std::int64_t width, double epsilon)
    : Module(parent, name), eps(epsilon), weight(*this, "weight", {width}, kOnes) {}

Tensor RmsNorm::operator()(const Tensor& x) const { return ops::rms_norm(x, weight, eps); }

ops::SumAndNorm RmsNorm::add(const Tensor& x, const Tensor& residual) const {
  return ops::add_rms_norm(x, residual, weight, eps);
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
          {options_.heads * options_.head_dim, o.width, o.bias, o.layout, o.out_init}) {
  const auto make = [&](Norm& norm, std::string_view norm_name) {
    if (o.qk_norm == HeadNorm::Rms)
      norm.rms.emplace(*this, norm_name, options_.head_dim, o.qk_norm_eps);
    else if (o.qk_norm == HeadNorm::Layer)
      norm.layer.emplace(*this, norm_name, options_.head_dim, o.qk_norm_eps);
  };
  make(q_norm_, "q_norm");
  make(k_norm_, "k_norm");
}

KvCache::KvCache(std::int64_t capacity) : capacity_(capacity) {}

KvCache::Layer& KvCache::layer(const Module& attention) {
  for (auto& [module, layer] : layers_)
    if (module == &attention) return layer;
  return layers_.emplace_back(&attention, Layer{}).second;
}

Tensor Attention::operator()(const Tensor& x, KvCache* cache) const {
  const AttentionOptions& o = options_;
  const ops::AttentionOptions attention{.heads = o.heads,
                                        .kv_heads = o.kv_heads,
                                        .window = o.window,
                                        .softcap = o.softcap,
                                        .scale = o.scale};
  const std::int64_t past = cache == nullptr ? 0 : cache->past;
  KvCache::Layer* const layer = cache == nullptr ? nullptr : &cache->layer(*this);
  if (layer != nullptr && !layer->k.defined()) {
    for (Tensor* t : {&layer->k, &layer->v})
      *t = Tensor::empty(x.context(), {x.dim(0), cache->capacity(), o.kv_heads, o.head_dim},
                         x.dtype(), MemoryCategory::Activations, "kv cache");
  }
  Tensor packed = qkv(x);
  if (o.qk_norm == HeadNorm::None) {
    if (o.rotary_base > 0)
      packed = ops::rotary_packed(packed, o.heads, o.kv_heads, o.rotary_base, past);
    return out(layer == nullptr
                   ? ops::attention(packed, attention)
                   : ops::cached_attention(packed, attention, layer->k, layer->v, past));
  }
  const std::int64_t kv_width = o.kv_heads * o.head_dim;
  std::vector<Tensor> parts = ops::split(packed, {o.heads * o.head_dim, kv_width, kv_width}, -1);
  for (Tensor& part : parts)
    part = ops::reshape(part, {x.dim(0), x.dim(1), part.dim(2) / o.head_dim, o.head_dim});
  const auto prepare = [&](Tensor& heads, const Norm& norm) {
    if (norm.rms) heads = (*norm.rms)(heads);
    if (norm.layer) heads = (*norm.layer)(heads);
    if (o.rotary_base > 0) heads = ops::rotary(heads, o.rotary_base, past);
  };
  prepare(parts[0], q_norm_);
  prepare(parts[1], k_norm_);
  return out(layer == nullptr ? ops::attention(parts[0], parts[1], parts[2], attention)
                              : ops::cached_attention(parts[0], parts[1], parts[2], attention,
                                                      layer->k, layer->v, past));
}

Mlp::Mlp(Module& parent, std::string_view name, const MlpOptions& o)
    : Module(parent, name),
      up(*this, o.names.up, {o.width, o.hidden, o.bias, o.layout, o.init}),
      down(*this, o.names.down, {o.hidden, o.width, o.bias, o.layout, o.out_init}) {}

Tensor Mlp::operator()(const Tensor& x) const {
  return recompute_mlp(*this, x, [this](const Tensor& in) {
    return ops::gelu_mlp(in, up.weight, up.bias_or_none(), down.weight, down.bias_or_none(),
                         up.layout);
  });
}

GatedMlp::GatedMlp(Module& parent, std::string_view name, const MlpOptions& o)
    : Module(parent, name),
      up(*this, o.names.up, {o.width, 2 * o.hidden, o.bias, o.layout, o.init}),
      down(*this, o.names.down, {o.hidden, o.width, o.bias, o.layout, o.out_init}) {}

Tensor GatedMlp::operator()(const Tensor& x) const {
  return recompute_mlp(*this, x, [this](const Tensor& in) {
    return ops::swiglu_linear(up(in), down.weight, down.bias_or_none(), down.layout);
  });
}

}  // namespace tessera::nn
