#include "models/gpt2.h"

#include <cmath>
#include <utility>

#include "core/autograd/autograd.h"
#include "core/ops/attention.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "core/ops/view.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace tessera::models {
namespace {

using ops::WeightLayout;

// Standard deviation of initial weights. For projections into the residual stream it is divided by
// the square root of the number of such projections.
constexpr float kStd = 0.02F;

// Numbers of the dropout layers: one after the embedding, then two per block.
constexpr std::uint64_t kEmbeddingPlace = 0;
std::uint64_t attention_place(std::int64_t layer) {
  return 1 + 2 * static_cast<std::uint64_t>(layer);
}
std::uint64_t mlp_place(std::int64_t layer) { return 2 + 2 * static_cast<std::uint64_t>(layer); }

}  // namespace

Gpt2::Gpt2(const Gpt2Config& config) : config_(config) {
  config_.validate();
  const std::int64_t c = config_.n_embd;
  const Initialization zeros{Initialization::Kind::Zeros, 0.0F};
  const Initialization ones{Initialization::Kind::Ones, 0.0F};
  const Initialization normal{Initialization::Kind::Normal, kStd};
  const Initialization residual{Initialization::Kind::Normal,
                                kStd / std::sqrt(2.0F * static_cast<float>(config_.n_layer))};

  Unit unit;
  const auto add = [&unit](Parameter& parameter, std::string name, const Shape& shape,
                           Initialization init) {
    parameter = {std::move(name), Tensor::unbound(shape, DType::F32), init, shape.size() >= 2};
    parameter.tensor.set_requires_grad(true);
    unit.parameters.push_back(&parameter);
  };

  unit.name = "root";
  add(wte_, "wte.weight", {config_.vocab_size, c}, normal);
  add(wpe_, "wpe.weight", {config_.seq_len, c}, normal);
  add(ln_f_weight_, "ln_f.weight", {c}, ones);
  add(ln_f_bias_, "ln_f.bias", {c}, zeros);
  units_.push_back(std::exchange(unit, {}));

  for (std::int64_t i = 0; i < config_.n_layer; ++i) {
    const std::string h = fmt::format("h.{}", i);
    unit.name = h;
    Block& b = blocks_.emplace_back();
    add(b.ln_1_weight, h + ".ln_1.weight", {c}, ones);
    add(b.ln_1_bias, h + ".ln_1.bias", {c}, zeros);
    add(b.c_attn_weight, h + ".attn.c_attn.weight", {c, 3 * c}, normal);
    add(b.c_attn_bias, h + ".attn.c_attn.bias", {3 * c}, zeros);
    add(b.attn_c_proj_weight, h + ".attn.c_proj.weight", {c, c}, residual);
    add(b.attn_c_proj_bias, h + ".attn.c_proj.bias", {c}, zeros);
    add(b.ln_2_weight, h + ".ln_2.weight", {c}, ones);
    add(b.ln_2_bias, h + ".ln_2.bias", {c}, zeros);
    add(b.c_fc_weight, h + ".mlp.c_fc.weight", {c, 4 * c}, normal);
    add(b.c_fc_bias, h + ".mlp.c_fc.bias", {4 * c}, zeros);
    add(b.mlp_c_proj_weight, h + ".mlp.c_proj.weight", {4 * c, c}, residual);
    add(b.mlp_c_proj_bias, h + ".mlp.c_proj.bias", {c}, zeros);
    units_.push_back(std::exchange(unit, {}));
  }
}

std::vector<Parameter*> Gpt2::parameters() {
  std::vector<Parameter*> result;
  for (const Unit& unit : units_) {
    result.insert(result.end(), unit.parameters.begin(), unit.parameters.end());
  }
  return result;
}

void Gpt2::check_tokens(const Tensor& tokens, std::int64_t past) const {
  require(tokens.shape().size() == 2, "GPT-2 takes tokens [B, T], got shape {}", tokens.shape());
  require(tokens.dtype() == DType::I32, "GPT-2 takes tokens of dtype i32, got {}", tokens.dtype());
  require(past + tokens.dim(1) <= config_.seq_len,
          "{} tokens are more than the model's {} positions (model.seq_len)", past + tokens.dim(1),
          config_.seq_len);
}

Tensor Gpt2::drop(const Tensor& x, const ForwardOptions& options, std::uint64_t place) const {
  return options.training ? ops::dropout(x, config_.dropout, place) : x;
}

Tensor Gpt2::block(std::int64_t layer, const Tensor& x, const ForwardOptions& options,
                   const KvCache* cache) const {
  const auto i = static_cast<std::size_t>(layer);
  const Block& b = blocks_[i];
  const double eps = config_.layer_norm_eps;
  Tensor a = ops::layer_norm(x, b.ln_1_weight.tensor, b.ln_1_bias.tensor, eps);
  a = ops::linear(a, b.c_attn_weight.tensor, b.c_attn_bias.tensor, WeightLayout::InOut);
  a = cache == nullptr
          ? ops::causal_attention(a, config_.n_head)
          : ops::cached_attention(a, config_.n_head, cache->k[i], cache->v[i], cache->past);
  a = ops::linear(a, b.attn_c_proj_weight.tensor, b.attn_c_proj_bias.tensor, WeightLayout::InOut);
  const auto [h, normed] = ops::add_layer_norm(x, drop(a, options, attention_place(layer)),
                                               b.ln_2_weight.tensor, b.ln_2_bias.tensor, eps);
  a = ops::gelu_mlp(normed, b.c_fc_weight.tensor, b.c_fc_bias.tensor, b.mlp_c_proj_weight.tensor,
                    b.mlp_c_proj_bias.tensor, WeightLayout::InOut);
  return ops::add(h, drop(a, options, mlp_place(layer)));
}

Tensor Gpt2::hidden(const Tensor& tokens, const ForwardOptions& options) {
  check_tokens(tokens, 0);
  UnitHooks* const hooks = options.hooks;
  if (hooks != nullptr) hooks->before_forward(0);
  Tensor x = drop(ops::embedding(tokens, wte_.tensor, wpe_.tensor), options, kEmbeddingPlace);
  for (std::int64_t layer = 0; layer < config_.n_layer; ++layer) {
    const int unit = static_cast<int>(layer) + 1;
    if (hooks != nullptr) {
      hooks->before_forward(unit);
      x = autograd::boundary(x, [hooks, unit] { hooks->after_backward(unit); });
    }
    if (options.recompute_blocks) {
      x = autograd::recompute(
          [this, layer, options](const Tensor& input) { return block(layer, input, options); }, x);
    } else {
      x = block(layer, x, options);
    }
    if (hooks != nullptr) {
      x = autograd::boundary(x, [hooks, unit] { hooks->before_backward(unit); });
      hooks->after_forward(unit);
    }
  }
  return ops::layer_norm(x, ln_f_weight_.tensor, ln_f_bias_.tensor, config_.layer_norm_eps);
}

Tensor Gpt2::loss(const Tensor& tokens, const Tensor& targets, double scale,
                  const ForwardOptions& options) {
  require(targets.shape() == tokens.shape(), "targets {} must have the shape of tokens {}",
          targets.shape(), tokens.shape());
  const Tensor x = hidden(tokens, options);
  const std::int64_t rows = tokens.numel();
  Tensor result = ops::linear_cross_entropy(ops::reshape(x, {rows, config_.n_embd}), wte_.tensor,
                                            targets.alias({rows}, {1}, 0), scale);
  if (options.hooks != nullptr) options.hooks->after_forward(0);
  return result;
}

Tensor Gpt2::logits(const Tensor& tokens, const ForwardOptions& options) {
  const Tensor x = hidden(tokens, options);
  Tensor result = ops::linear(x, wte_.tensor, {}, WeightLayout::OutIn);
  if (options.hooks != nullptr) options.hooks->after_forward(0);
  return result;
}

KvCache Gpt2::make_cache(std::int64_t batch) const {
  KvCache cache;
  const Shape shape{batch, config_.seq_len, config_.n_head, config_.n_embd / config_.n_head};
  for (std::int64_t i = 0; i < config_.n_layer; ++i) {
    for (auto* list : {&cache.k, &cache.v}) {
      list->push_back(Tensor::empty(wte_.tensor.context(), shape, wte_.tensor.dtype(),
                                    MemoryCategory::Activations, "kv cache"));
    }
  }
  return cache;
}

Tensor Gpt2::decode(const Tensor& tokens, KvCache& cache) {
  check_tokens(tokens, cache.past);
  const NoGradGuard no_grad(*tokens.context());
  const std::int64_t batch = tokens.dim(0);
  const std::int64_t count = tokens.dim(1);
  Tensor x = ops::embedding(tokens, wte_.tensor, wpe_.tensor, cache.past);
  for (std::int64_t layer = 0; layer < config_.n_layer; ++layer) x = block(layer, x, {}, &cache);
  cache.past += count;
  // The head runs on the last position of each row only.
  const std::int64_t c = config_.n_embd;
  const Tensor last_rows = x.alias({batch, c}, {count * c, 1}, (count - 1) * c);
  Tensor last = Tensor::empty(x.context(), {batch, c}, x.dtype());
  kernels::cast(*x.context(), last_rows.view(), {last.view(), false, true});
  last = ops::layer_norm(last, ln_f_weight_.tensor, ln_f_bias_.tensor, config_.layer_norm_eps);
  const DType out = x.dtype() == DType::F64 ? DType::F64 : DType::F32;
  Tensor result = Tensor::empty(x.context(), {batch, config_.vocab_size}, out);
  kernels::matmul(
      *x.context(),
      {.a = last.view(), .b = wte_.tensor.view(), .c = result.view(), .transpose_b = true});
  return result;
}

}  // namespace tessera::models
