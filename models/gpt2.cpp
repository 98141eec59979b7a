#include "models/gpt2.h"

#include <cmath>

#include "core/nn/unit.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/view.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace tessera::models {
namespace {

using ops::WeightLayout;

// Initialization of projections into the residual stream.
Initialization residual(const Arch& arch) {
  return {Initialization::Kind::Normal,
          nn::kNormal.std / std::sqrt(2.0F * static_cast<float>(arch.n_layer))};
}

}  // namespace

Gpt2Block::Gpt2Block(nn::Module& parent, std::string_view name, const Arch& c)
    : Module(parent, name),
      ln_1_(*this, "ln_1", c.n_embd, c.layer_norm_eps),
      attn_(*this, "attn",
            {.width = c.n_embd,
             .heads = c.n_head,
             .layout = WeightLayout::InOut,
             .out_init = residual(c),
             .names = {.qkv = "c_attn", .out = "c_proj"}}),
      attn_dropout_(*this, "attn_dropout", c.dropout),
      ln_2_(*this, "ln_2", c.n_embd, c.layer_norm_eps),
      mlp_(*this, "mlp",
           {.width = c.n_embd,
            .hidden = 4 * c.n_embd,
            .layout = WeightLayout::InOut,
            .out_init = residual(c),
            .names = {.up = "c_fc", .down = "c_proj"}}),
      mlp_dropout_(*this, "mlp_dropout", c.dropout) {}

Tensor Gpt2Block::operator()(const Tensor& x, nn::KvCache* cache) const {
  const auto [h, normed] = ln_2_.add(x, attn_dropout_(attn_(ln_1_(x), cache)));
  return ops::add(h, mlp_dropout_(mlp_(normed)));
}

Gpt2::Gpt2(const Arch& arch)
    : LanguageModel(arch),
      wte_(*this, "wte", arch.vocab_size, arch.n_embd),
      wpe_(*this, "wpe", arch.seq_len, arch.n_embd),
      dropout_(*this, "dropout", arch.dropout),
      h_(*this, "h", arch.n_layer, arch),
      ln_f_(*this, "ln_f", arch.n_embd, arch.layer_norm_eps) {}

Tensor Gpt2::hidden(const Tensor& tokens, nn::KvCache* cache) {
  const std::int64_t past = cache == nullptr ? 0 : cache->past;
  require(tokens.shape().size() == 2, "GPT-2 takes tokens [B, T], got shape {}", tokens.shape());
  require(tokens.dtype() == DType::I32, "GPT-2 takes tokens of dtype i32, got {}", tokens.dtype());
  require(past + tokens.dim(1) <= arch().seq_len,
          "{} tokens are more than the model's {} positions (model.seq_len)", past + tokens.dim(1),
          arch().seq_len);
  const auto embed = [this, past](const Tensor& t) {
    return dropout_(ops::embedding(t, wte_.weight, wpe_.weight, past));
  };
  Tensor x = nn::unit({&wte_, &wpe_}, embed, tokens);
  for (Gpt2Block& block : h_) x = nn::unit(block, x, cache);
  return nn::unit(ln_f_, x);
}

Tensor Gpt2::loss(const Tensor& tokens, const Tensor& targets, double scale) {
  require(targets.shape() == tokens.shape(), "targets {} must have the shape of tokens {}",
          targets.shape(), tokens.shape());
  const std::int64_t rows = tokens.numel();
  const Tensor x = ops::reshape(hidden(tokens, nullptr), {rows, arch().n_embd});
  const auto head = [this, scale](const Tensor& h, const Tensor& t) {
    return ops::linear_cross_entropy(h, wte_.weight, t, scale);
  };
  return nn::unit({&wte_}, head, x, targets.alias({rows}, {1}, 0));
}

Tensor Gpt2::logits(const Tensor& tokens) {
  const auto head = [this](const Tensor& h) {
    return ops::linear(h, wte_.weight, {}, WeightLayout::OutIn);
  };
  return nn::unit({&wte_}, head, hidden(tokens, nullptr));
}

Tensor Gpt2::decode(const Tensor& tokens, nn::KvCache& cache) {
  const NoGradGuard no_grad(*tokens.context());
  const Tensor x = hidden(tokens, &cache);
  const std::int64_t batch = tokens.dim(0), count = tokens.dim(1), c = arch().n_embd;
  cache.past += count;
  // The head runs on the last position of each row only.
  const Tensor last_rows = x.alias({batch, c}, {count * c, 1}, (count - 1) * c);
  const auto head = [this](const Tensor& rows) {
    const Tensor last = Tensor::empty(rows.context(), rows.shape(), rows.dtype());
    kernels::cast(*rows.context(), rows.view(), {last.view(), false, true});
    const DType out = rows.dtype() == DType::F64 ? DType::F64 : DType::F32;
    Tensor logits = Tensor::empty(rows.context(), {rows.dim(0), arch().vocab_size}, out);
    kernels::matmul(*rows.context(), {.a = last.view(),
                                      .b = wte_.weight.tensor.view(),
                                      .c = logits.view(),
                                      .transpose_b = true});
    return logits;
  };
  return nn::unit({&wte_}, head, last_rows);
}

}  // namespace tessera::models
