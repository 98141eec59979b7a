#pragma once

#include <cstdint>

#include "core/nn/layers.h"
#include "models/gpt2_config.h"

namespace tessera::models {

/// A pre-norm block: causal attention and a tanh-GELU MLP of 4 C, each added to its input.
class Gpt2Block : public nn::Module {
 public:
  Gpt2Block(nn::Module& parent, std::string_view name, const Gpt2Config& config);
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
class Gpt2 : public nn::Module {
 public:
  explicit Gpt2(const Gpt2Config& config);

  const Gpt2Config& config() const { return config_; }

  /// scale * sum of cross-entropies in nats.
  /// @param tokens   [B, T] i32, T <= seq_len
  /// @param targets  [B, T] i32, -1: ignored
  /// @param scale    e.g. 1 / (tokens of the whole step)
  /// @return         [1], f32. Must be the root of backward; see ops::linear_cross_entropy.
  Tensor loss(const Tensor& tokens, const Tensor& targets, double scale);

  /// @param tokens  [B, T] i32
  /// @return        [B, T, V], dtype of the parameters (all logits: for small models and tests)
  Tensor logits(const Tensor& tokens);

  /// Decoding: appends T new tokens to the cache and returns the logits of the last one.
  /// @param tokens  [B, T] i32; cache.past + T <= cache.capacity() <= seq_len
  /// @return        [B, V], accumulator dtype. Not differentiable.
  Tensor decode(const Tensor& tokens, nn::KvCache& cache);

 private:
  Tensor hidden(const Tensor& tokens, nn::KvCache* cache);

  Gpt2Config config_;
  nn::Embedding wte_, wpe_;
  nn::Dropout dropout_;
  nn::List<Gpt2Block> h_;
  nn::LayerNorm ln_f_;
};

}  // namespace tessera::models
