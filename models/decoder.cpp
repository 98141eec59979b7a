#include "models/decoder.h"

#include <algorithm>
#include <cmath>

#include "core/nn/unit.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/norm.h"
#include "core/ops/reduction.h"
#include "core/ops/unary.h"
#include "core/ops/view.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace tessera::models {
namespace {

ops::WeightLayout layout_of(const Arch& arch) {
  return arch.family == "gpt2" ? ops::WeightLayout::InOut : ops::WeightLayout::OutIn;
}

// Initialization of projections into the residual stream.
Initialization residual(const Arch& arch) {
  return {Initialization::Kind::Normal,
          nn::kNormal.std / std::sqrt(2.0F * static_cast<float>(arch.n_layer))};
}

nn::NormOptions norm_of(const Arch& arch) { return {arch.norm, arch.norm_eps, arch.norm_offset}; }

nn::AttentionOptions attention_of(const Arch& arch, std::int64_t layer) {
  const auto has = [layer](const std::vector<std::int64_t>& layers) {
    return std::ranges::find(layers, layer) != layers.end();
  };
  const bool windowed = arch.window > 0 && !has(arch.full_layers);
  nn::AttentionOptions options{.width = arch.n_embd,
                               .heads = arch.n_head,
                               .kv_heads = arch.kv_heads(),
                               .head_dim = arch.width_of_head(),
                               .window = windowed ? arch.window : 0,
                               .softcap = arch.attention_softcap,
                               .scale = arch.attention_scale,
                               .qk_norm = arch.qk_norm,
                               .bias = arch.qkv_bias,
                               .out_bias = arch.out_bias,
                               .layout = layout_of(arch),
                               .out_init = residual(arch),
                               .names = names_of(arch).in_attention};
  if (!has(arch.layers_without_rotary))
    options.rotary = windowed && arch.local_rotary.base > 0 ? arch.local_rotary : arch.rotary;
  return options;
}

nn::MlpOptions mlp_of(const Arch& arch) {
  return {.width = arch.n_embd,
          .hidden = arch.hidden(),
          .activation = arch.mlp == Arch::Mlp::ReluSquared ? nn::Activation::ReluSquared
                                                           : nn::Activation::Gelu,
          .gate = arch.mlp == Arch::Mlp::GeGlu ? ops::Gate::Gelu : ops::Gate::Silu,
          .bias = arch.mlp_bias,
          .layout = layout_of(arch),
          .out_init = residual(arch),
          .names = names_of(arch).in_mlp};
}

nn::ExpertsOptions experts_of(const Arch& arch) {
  nn::MlpOptions expert = mlp_of(arch);
  if (arch.experts.inner > 0) expert.hidden = arch.experts.inner;
  return {arch.experts.count, arch.experts.per_token, arch.experts.renormalize, expert};
}

// Constructed in place, because modules can't be moved.
template <typename M, typename Options>
std::optional<M> module_if(bool is_there, nn::Module& parent, std::string_view name,
                           const Options& options) {
  return is_there ? std::optional<M>(std::in_place, parent, name, options)
                  : std::optional<M>(std::nullopt);
}

std::optional<nn::Norm> norm_if(bool is_there, nn::Module& parent, std::string_view name,
                                const Arch& arch) {
  return is_there ? std::optional<nn::Norm>(std::in_place, parent, name, arch.n_embd, norm_of(arch))
                  : std::optional<nn::Norm>(std::nullopt);
}

std::optional<nn::Embedding> positions_of(nn::Module& parent, const Arch& arch) {
  return arch.learned_positions
             ? std::optional<nn::Embedding>(std::in_place, parent, names_of(arch).positions,
                                            arch.seq_len, arch.n_embd)
             : std::optional<nn::Embedding>(std::nullopt);
}

// A layer's number: it is its parent's newest child.
std::int64_t newest_child(const nn::Module& parent) {
  return static_cast<std::int64_t>(parent.children().size()) - 1;
}

}  // namespace

DecoderBlock::DecoderBlock(nn::Module& parent, std::string_view name, const Arch& arch)
    : Module(parent, name),
      attention_norm_(norm_if(arch.pre_norm, *this, names_of(arch).attention_norm, arch)),
      attention_(*this, names_of(arch).attention, attention_of(arch, newest_child(parent))),
      post_attention_norm_(
          norm_if(arch.post_norm, *this, names_of(arch).post_attention_norm, arch)),
      attention_dropout_(*this, "attn_dropout", arch.dropout),
      mlp_norm_(norm_if(arch.pre_norm, *this, names_of(arch).mlp_norm, arch)),
      mlp_(module_if<nn::Mlp>(!arch.is_gated(), *this, names_of(arch).mlp, mlp_of(arch))),
      gated_mlp_(module_if<nn::GatedMlp>(arch.is_gated() && !arch.has_experts(newest_child(parent)),
                                         *this, names_of(arch).mlp, mlp_of(arch))),
      experts_(module_if<nn::Experts>(arch.has_experts(newest_child(parent)), *this,
                                      names_of(arch).mlp, experts_of(arch))),
      post_mlp_norm_(norm_if(arch.post_norm, *this, names_of(arch).post_mlp_norm, arch)),
      mlp_dropout_(*this, "mlp_dropout", arch.dropout) {}

std::array<Tensor, 3> DecoderBlock::operator()(const Tensor& x, nn::KvCache* cache,
                                               const Packing& packing, bool balance) {
  const auto normed = [](const std::optional<nn::Norm>& norm, const Tensor& t) {
    return norm ? (*norm)(t) : t;
  };
  const Tensor attended = normed(post_attention_norm_,
                                 attention_(normed(attention_norm_, x), cache, packing.documents));
  const Tensor branch = attention_dropout_(attended);
  ops::SumAndNorm h;
  if (mlp_norm_) {
    h = mlp_norm_->add(x, branch);
  } else {
    h.sum = ops::add(x, branch);
    h.y = h.sum;
  }
  // The last product adds the residual, unless something else follows it.
  const bool adds_apart = experts_ || post_mlp_norm_ || mlp_dropout_.is_active();
  const Tensor residual = adds_apart ? Tensor() : h.sum;
  nn::Experts::Result mlp;
  if (experts_)
    mlp = (*experts_)(h.y);
  else
    mlp.y = mlp_ ? (*mlp_)(h.y, residual) : (*gated_mlp_)(h.y, residual);
  const Tensor y =
      adds_apart ? ops::add(h.sum, mlp_dropout_(normed(post_mlp_norm_, mlp.y))) : mlp.y;
  return balance ? std::array{y, mlp.probabilities, mlp.counts} : std::array{y, Tensor(), Tensor()};
}

Decoder::Decoder(const Arch& arch)
    : LanguageModel(arch),
      embed_(*this, names_of(arch).embed, arch.vocab_size, arch.n_embd),
      positions_(positions_of(*this, arch)),
      dropout_(*this, "dropout", arch.dropout),
      blocks_(*this, names_of(arch).blocks, arch.n_layer, arch),
      norm_(*this, names_of(arch).norm, arch.n_embd, norm_of(arch)),
      head_(module_if<nn::Linear>(
          !arch.tied, *this, names_of(arch).head,
          nn::LinearOptions{.in = arch.n_embd, .out = arch.vocab_size, .bias = false})) {
  if (head_) head_->weight.is_matrix = false;
}

nn::Module& Decoder::head() {
  if (head_) return *head_;
  return embed_;
}

const Tensor& Decoder::head_weight() const {
  return head_ ? head_->weight.tensor : embed_.weight.tensor;
}

Tensor Decoder::embedded(const Tensor& tokens, std::int64_t past, const Tensor& positions) const {
  const bool packed = positions_ && positions.defined();
  const Tensor in_order = positions_ && !packed ? positions_->weight.tensor : Tensor();
  Tensor x = ops::embedding(tokens, embed_.weight, in_order, past);
  if (packed) x = ops::add(x, (*positions_)(positions));
  if (arch().embedding_scale != 1.0) {
    const bool is_bf16 = x.dtype() == DType::BF16;
    const auto scale = static_cast<float>(arch().embedding_scale);
    x = x * static_cast<double>(is_bf16 ? static_cast<float>(BFloat16(scale)) : scale);
  }
  if (arch().embedding_norm) x = ops::rms_norm(x, {}, arch().norm_eps);
  return dropout_(x);
}

Tensor Decoder::hidden(const Tensor& tokens, nn::KvCache* cache, const Packing& packing,
                       Balance* balance) {
  const std::int64_t past = cache == nullptr ? 0 : cache->past;
  require(tokens.shape().size() == 2, "a model takes tokens [B, T], got shape {}", tokens.shape());
  require(tokens.dtype() == DType::I32, "a model takes tokens of dtype i32, got {}",
          tokens.dtype());
  require(past + tokens.dim(1) <= arch().seq_len,
          "{} tokens are more than the model's {} positions (model.seq_len)", past + tokens.dim(1),
          arch().seq_len);
  const auto embed = [this, past, positions = packing.positions](const Tensor& t) {
    return embedded(t, past, positions);
  };
  Tensor x = positions_ ? nn::unit({&embed_, &*positions_}, embed, tokens)
                        : nn::unit({&embed_}, embed, tokens);
  const auto add = [](Tensor& sum, const Tensor& term) {
    sum = sum.defined() ? ops::add(sum, term) : term;
  };
  for (DecoderBlock& block : blocks_) {
    const std::array<Tensor, 3> results = nn::unit(block, x, cache, packing, balance != nullptr);
    x = results[0];
    if (!results[1].defined()) continue;
    add(balance->probabilities, results[1]);
    add(balance->counts, results[2].detach());
    ++balance->layers;
  }
  return nn::unit(norm_, x);
}

Tensor Decoder::capped(const Tensor& logits) const {
  const double cap = arch().logits_softcap;
  return cap > 0 ? ops::tanh(logits * (1.0 / cap)) * cap : logits;
}

// Number of experts times the sum over experts of routed tokens / tokens times mean probability, over
// the tokens of all layers. Source: load_balancing_loss_func() of transformers; Fedus et al. 2021,
// arXiv:2101.03961, eq. 4 to 6.
Tensor Decoder::balance_loss(const Balance& balance, std::int64_t tokens, double weight) const {
  const Arch::Experts& experts = arch().experts;
  const double rows = static_cast<double>(tokens) * static_cast<double>(balance.layers);
  const Tensor products = ops::sum(balance.probabilities * balance.counts);
  return ops::reshape(products, {1}) *
         (experts.aux_loss * static_cast<double>(experts.count) * weight / (rows * rows));
}

Tensor Decoder::loss(const Tensor& tokens, const Tensor& targets, double scale,
                     const Packing& packing) {
  require(targets.shape() == tokens.shape(), "targets {} must have the shape of tokens {}",
          targets.shape(), tokens.shape());
  const std::int64_t rows = tokens.numel();
  Balance balance;
  const bool balances = arch().experts.aux_loss > 0 && tokens.context()->grad_enabled();
  const Tensor x = ops::reshape(hidden(tokens, nullptr, packing, balances ? &balance : nullptr),
                                {rows, arch().n_embd});
  const auto loss_of = [this, scale](const Tensor& h, const Tensor& t) {
    return ops::linear_cross_entropy(h, head_weight(), t, scale, 0, arch().logits_softcap);
  };
  Tensor loss = nn::unit({&head()}, loss_of, x, targets.alias({rows}, {1}, 0));
  if (balance.layers == 0) return loss;
  const auto weight = static_cast<double>(packing.targets < 0 ? rows : packing.targets) * scale;
  return ops::add(loss, balance_loss(balance, rows, weight));
}

Tensor Decoder::logits(const Tensor& tokens) {
  const auto of_hidden = [this](const Tensor& h) {
    return capped(ops::linear(h, head_weight(), {}));
  };
  return nn::unit({&head()}, of_hidden, hidden(tokens, nullptr));
}

bool Decoder::outgrows(std::int64_t past, std::int64_t count) const {
  const ops::RotaryScaling& scaling = arch().rotary.scaling;
  return scaling.kind == ops::RotaryScaling::Kind::LongRope && past > 0 &&
         past <= scaling.original && past + count > scaling.original;
}

Tensor Decoder::decode(const Tensor& tokens, nn::KvCache& cache) {
  const NoGradGuard no_grad(*tokens.context());
  const Tensor x = hidden(tokens, &cache);
  const std::int64_t batch = tokens.dim(0), count = tokens.dim(1), c = arch().n_embd;
  cache.past += count;
  // The head runs on the last position of each row only.
  return logits_of(x.alias({batch, c}, {count * c, 1}, (count - 1) * c));
}

Tensor Decoder::features(const Tensor& tokens) { return hidden(tokens, nullptr); }

Tensor Decoder::logits_of(const Tensor& features) {
  const NoGradGuard no_grad(*features.context());
  const auto logits = [this](const Tensor& rows) {
    const Tensor dense = Tensor::empty(rows.context(), rows.shape(), rows.dtype());
    kernels::cast(*rows.context(), rows.view(), {dense.view(), false, true});
    const DType out = rows.dtype() == DType::F64 ? DType::F64 : DType::F32;
    Tensor product = Tensor::empty(rows.context(), {rows.dim(0), arch().vocab_size}, out);
    kernels::matmul(
        *rows.context(),
        {.a = dense.view(), .b = head_weight().view(), .c = product.view(), .transpose_b = true});
    return capped(product);
  };
  return nn::unit({&head()}, logits, features);
}

}  // namespace tessera::models
