#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace tessera::io {

inline constexpr std::int64_t kMostExperts = 256;  ///< of a layer

/// Experts of a family: names of weights and values of settings that a config.json leaves out.
struct DecoderExperts {
  std::string_view module = "mlp";  ///< of a layer
  std::string_view gate = "gate_proj", up = "up_proj", down = "down_proj";
  std::string_view count_key = "num_experts";
  std::int64_t count = 0, per_token = 0;  ///< 0: the family has no experts
  std::int64_t inner = 0;                 ///< 0: intermediate_size is the width of an expert
  bool renormalizes = false;              ///< whatever norm_topk_prob says
  bool has_dense_layers = false;          ///< by decoder_sparse_step and mlp_only_layers
  double aux_loss = 0;
};

/// Layers of a family that attend to a window of tokens.
struct DecoderWindows {
  enum class Layers : std::uint8_t {
    None,
    All,
    AllButEvery,  ///< all but each full_every-th
    Last,         ///< from max_window_layers on
    Rotary,       ///< those with rotary positions
  };
  Layers layers = Layers::None;
  std::int64_t size = 0;  ///< 0: no window unless sliding_window is given
  std::int64_t full_every = 0;
  const char* full_every_key = nullptr;  ///< setting that replaces full_every
  bool has_flag = false;                 ///< use_sliding_window must be true
  bool has_list = true;                  ///< layer_types replaces the rule
  bool needs_size = false;               ///< the class needs a number even without windowed layers
};

/// A family of decoders other than GPT-2: what differs from Llama, and the values of settings that its
/// config.json leaves out. Switches are those of models::Arch.
struct DecoderFamily {
  std::string_view name;          ///< "arch" of a "model" section
  std::string_view model_type;    ///< of config.json
  std::string_view architecture;  ///< class of transformers
  std::int64_t kv_heads = 0;      ///< 0: as many as heads
  std::int64_t head_dim = 0;      ///< 0: hidden_size / num_attention_heads
  bool tied = false;
  double eps = 1e-6;

  std::string_view norm = "rms";
  double norm_offset = 0;
  bool pre_norm = true, post_norm = false;
  std::string_view qk_norm = "";  ///< over "head" or "all"; empty: none
  bool qk_norm_after_rotary = false;
  bool scales_embedding = false;  ///< by the root of hidden_size
  bool embedding_norm = false;

  std::string_view mlp = "swiglu", activation = "silu";
  std::string_view activation_alias = "";  ///< read as `activation`
  const char* activation_key = "hidden_act";
  const char* second_activation_key = nullptr;  ///< written too
  bool always_qkv_bias = false;                 ///< without a setting, and without one of out
  bool writes_mlp_bias = false;
  bool fused = false;  ///< q, k, v are one tensor on disk, and gate, up
  DecoderExperts experts = {};

  std::optional<double> query_scalar = {};  ///< query_pre_attn_scalar; none: no such setting
  std::optional<double> attention_softcap = {}, logits_softcap = {};
  DecoderWindows windows = {};

  double rope_theta = 10'000;
  bool has_two_ropes = false;  ///< of windowed and full layers
  double local_theta = 0;      ///< rope_local_base_freq of windowed layers; 0: rope_theta
  bool reverse_rotary = false;
  bool skips_rotary = false;  ///< layers without rotary positions, by no_rope_layers
  /// Phi-3's settings: partial_rotary_factor, other names of longrope, and this value of
  /// original_max_position_embeddings. 0: none of these
  std::int64_t original_positions = 0;
};

std::span<const DecoderFamily> decoder_families();
/// Null if there is no such family.
const DecoderFamily* find_decoder_family(std::string_view name);
/// By the "model_type" of a config.json.
const DecoderFamily* decoder_family_of_type(std::string_view model_type);

}  // namespace tessera::io
