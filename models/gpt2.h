#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/parameter.h"
#include "models/gpt2_config.h"

namespace tessera::models {

/// How a forward pass runs.
struct ForwardOptions {
  bool training = false;          ///< apply dropout; masks depend on the context's rng_step()
  bool recompute_blocks = false;  ///< keep only block inputs; run each block again in backward
  UnitHooks* hooks = nullptr;     ///< called around every unit; may be null
};

/// Keys and values of the tokens seen so far, for decoding.
struct KvCache {
  std::vector<Tensor> k, v;  ///< per layer [B, P, H, D]
  std::int64_t past = 0;     ///< filled positions
};

/// GPT-2: token and position embedding, pre-norm blocks (causal attention, tanh-GELU MLP of 4 C),
/// final norm, head tied to the token embedding.
///
/// Parameter names and layouts are Hugging Face's without the leading "transformer.": matrices of
/// attention and MLP are stored [in, out]. Units: the root "root" (wte, wpe, ln_f), then "h.0", ...
/// Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
class Gpt2 {
 public:
  explicit Gpt2(const Gpt2Config& config);
  Gpt2(const Gpt2&) = delete;
  Gpt2& operator=(const Gpt2&) = delete;

  const Gpt2Config& config() const { return config_; }
  const std::vector<Unit>& units() const { return units_; }
  /// All parameters in the order of units. Pointers are stable.
  std::vector<Parameter*> parameters();

  /// scale * sum of cross-entropies in nats.
  /// @param tokens   [B, T] i32, T <= seq_len
  /// @param targets  [B, T] i32, -1: ignored
  /// @param scale    e.g. 1 / (tokens of the whole step)
  /// @return         [1], f32. Must be the root of backward; see ops::linear_cross_entropy.
  Tensor loss(const Tensor& tokens, const Tensor& targets, double scale,
              const ForwardOptions& options);

  /// @param tokens  [B, T] i32
  /// @return        [B, T, V], dtype of the parameters (all logits: for small models and tests)
  Tensor logits(const Tensor& tokens, const ForwardOptions& options);

  /// Decoding: appends T new tokens to the cache and returns the logits of the last one.
  /// @param tokens  [B, T] i32; cache.past + T <= seq_len
  /// @return        [B, V], accumulator dtype. Not differentiable.
  Tensor decode(const Tensor& tokens, KvCache& cache);
  KvCache make_cache(std::int64_t batch) const;

 private:
  struct Block {
    Parameter ln_1_weight, ln_1_bias, c_attn_weight, c_attn_bias, attn_c_proj_weight,
        attn_c_proj_bias, ln_2_weight, ln_2_bias, c_fc_weight, c_fc_bias, mlp_c_proj_weight,
        mlp_c_proj_bias;
  };
  Tensor hidden(const Tensor& tokens, const ForwardOptions& options);
  /// @param cache  for decoding; else null
  Tensor block(std::int64_t layer, const Tensor& x, const ForwardOptions& options,
               const KvCache* cache = nullptr) const;
  Tensor drop(const Tensor& x, const ForwardOptions& options, std::uint64_t place) const;
  void check_tokens(const Tensor& tokens, std::int64_t past) const;

  Gpt2Config config_;
  Parameter wte_, wpe_, ln_f_weight_, ln_f_bias_;
  std::deque<Block> blocks_;
  std::vector<Unit> units_;
};

}  // namespace tessera::models
