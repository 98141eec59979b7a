#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/nn/experts.h"

namespace tessera::models {

/// LoRA adapters of a decoder whose own weights are frozen.
struct Lora {
  std::int64_t rank = 8;
  double alpha = 16;  ///< the adapters' terms are multiplied by alpha / rank
  double dropout = 0;
  std::vector<std::string> targets{"all-linear"};  ///< see io::lora_layers()
  std::string base{};                              ///< MODEL that the frozen weights come from
  std::string base_digest{};                       ///< of that, if it is a checkpoint
};

/// Sizes and switches of a decoder. A block is attention and MLP, each with a norm before it, after it
/// or both, and each added to its input. Defaults: GPT-2 124M.
struct Arch {
  std::string family = "gpt2";  ///< of names, see Names
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;        ///< C
  std::int64_t vocab_size = 50257;  ///< V
  std::int64_t seq_len = 1024;      ///< P: positions, in tokens
  std::int64_t n_kv_head = 0;       ///< heads of keys and values; 0: n_head
  std::int64_t head_dim = 0;        ///< 0: n_embd / n_head
  std::int64_t n_inner = 0;         ///< width of the MLP; 0: 4 * n_embd

  nn::NormKind norm = nn::NormKind::Layer;
  double norm_eps = 1e-5;
  double norm_offset = 0;  ///< see nn::NormOptions
  bool pre_norm = true, post_norm = false;

  bool learned_positions = true;
  ops::RotaryOptions rotary{};        ///< none with a base of 0
  ops::RotaryOptions local_rotary{};  ///< of layers with a window; with a base of 0, `rotary`
  std::vector<std::int64_t> layers_without_rotary{};

  std::int64_t window = 0;                  ///< tokens that a query sees; 0: all before it
  std::vector<std::int64_t> full_layers{};  ///< layers without the window
  nn::QueryKeyNorm qk_norm{};
  double attention_scale = 0;    ///< 0: 1 / sqrt(head_dim)
  double attention_softcap = 0;  ///< 0: none
  bool qkv_bias = true, out_bias = true;

  enum class Mlp : std::uint8_t { Gelu, ReluSquared, SwiGlu, GeGlu };
  Mlp mlp = Mlp::Gelu;
  bool mlp_bias = true;

  /// Mixtures of experts, which are gated MLPs, in place of MLPs.
  struct Experts {
    std::int64_t count = 0;      ///< experts of a layer; 0: none
    std::int64_t per_token = 0;  ///< experts that compute a token
    std::int64_t inner = 0;      ///< width of an expert; 0: n_inner
    bool renormalize = true;     ///< the weights of a token's experts sum to 1
    double aux_loss = 0;         ///< coefficient of the loss that balances experts; 0: none
    std::vector<std::int64_t> dense_layers{};  ///< layers with an MLP
  };
  Experts experts{};

  double embedding_scale = 1;                   ///< rounded to the dtype of the parameters
  bool embedding_norm = false;                  ///< a plain RMS norm of the embedded tokens
  bool tied = true;                             ///< the head's weight is the token embedding's
  double logits_softcap = 0;                    ///< 0: none
  std::int64_t bos_token = -1, pad_token = -1;  ///< ids; -1: none
  std::vector<std::int64_t> eos_tokens{};       ///< ids that end a text
  std::optional<Lora> lora{};
  float dropout = 0.0F;  ///< on the embedding and on both residual branches; in [0, 1)

  std::int64_t kv_heads() const { return n_kv_head == 0 ? n_head : n_kv_head; }
  std::int64_t width_of_head() const { return head_dim == 0 ? n_embd / n_head : head_dim; }
  std::int64_t hidden() const { return n_inner == 0 ? 4 * n_embd : n_inner; }
  bool is_gated() const { return mlp == Mlp::SwiGlu || mlp == Mlp::GeGlu; }
  bool has_experts(std::int64_t layer) const;
  /// Parameters that compute a token, of `all`: without the experts that it is not routed to.
  std::int64_t active_parameters(std::int64_t all) const;
  /// @throws InvalidArgument naming the value that does not fit
  void validate() const;
};

/// Sizes of a new model; 0: as the family does it.
struct Sizes {
  std::int64_t n_layer = 0, n_head = 0, n_kv_head = 0, head_dim = 0;
  std::int64_t n_embd = 0, n_inner = 0, vocab_size = 0, seq_len = 0;
  std::int64_t n_expert = 0, n_expert_used = 0, n_expert_inner = 0;
};
/// A new model of a family: its switches, with default settings of Hugging Face's configuration.
/// n_inner is 4 n_embd, or 8/3 n_embd for a gated MLP, rounded up to a multiple of 64.
/// @throws Unsupported on an unknown family; InvalidArgument on sizes that don't fit
Arch arch_of_family(const std::string& family, const Sizes& sizes);

/// JSON object of an Arch: {"arch": family, "n_layer": ...}. Leaves out what is as in GPT-2, except
/// sizes.
std::string to_json(const Arch& arch);
/// Inverse of to_json(). @param source  named in errors
/// @throws CorruptCheckpoint naming source and field; Unsupported on a family not in this build
Arch parse_arch(const std::string& json, const std::string& source);

/// Names of a decoder's modules.
struct Names {
  std::string_view embed = "embed", positions = "positions", blocks = "layers", norm = "norm",
                   head = "head";
  std::string_view attention_norm = "attention_norm", attention = "attention",
                   post_attention_norm = "post_attention_norm", mlp_norm = "mlp_norm", mlp = "mlp",
                   post_mlp_norm = "post_mlp_norm";
  nn::AttentionNames in_attention = {};
  nn::MlpNames in_mlp = {};
};
/// GPT-2 has Hugging Face's names without "transformer.".
Names names_of(const Arch& arch);

}  // namespace tessera::models
