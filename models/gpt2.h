#pragma once

#include <cstdint>

#include "core/nn/layers.h"
#include "models/language_model.h"

namespace tessera::models {

/// A pre-norm block: causal attention and a tanh-GELU MLP of 4 C, each added to its input.
class Gpt2Block : public nn::Module {
 public:
  Gpt2Block(nn::Module& parent, std::string_view name, const Arch& arch);
  /// @param x      [B, T, C]
  /// @param cache  for decoding; else null
  Tensor operator()(const Tensor& x, nn::KvCache* cache) const;

 private:
  nn::LayerNorm ln_1_;
  nn::Attention attn_;
  nn::Dropout attn_dropout_;
  nn::LayerNorm ln_2_;
  nn::Mlp mlp_;
  nn::Dropout mlp_dropout_;
};

/// GPT-2: token and position embedding, blocks, final norm, head tied to the token embedding.
///
/// Parameter names and layouts are Hugging Face's without the leading "transformer.": matrices of
/// attention and MLP are stored [in, out].
/// Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
class Gpt2 final : public LanguageModel {
 public:
  explicit Gpt2(const Arch& arch);

  Tensor loss(const Tensor& tokens, const Tensor& targets, double scale) override;
  Tensor logits(const Tensor& tokens) override;
  Tensor decode(const Tensor& tokens, nn::KvCache& cache) override;

 private:
  Tensor hidden(const Tensor& tokens, nn::KvCache* cache);

  nn::Embedding wte_, wpe_;
  nn::Dropout dropout_;
  nn::List<Gpt2Block> h_;
  nn::LayerNorm ln_f_;
};

}  // namespace tessera::models
