#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "io/base/json.h"

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

/// A family of decoders other than GPT-2, and the values of settings that its config.json leaves out.
struct DecoderFamily {
  std::string_view name;          ///< "arch" of a "model" section
  std::string_view model_type;    ///< of config.json
  std::string_view architecture;  ///< class of transformers
  std::int64_t kv_heads = 0;      ///< 0: as many as heads
  std::int64_t head_dim = 0;      ///< 0: hidden_size / num_attention_heads
  bool tied = false;
  double eps = 1e-6;
  double rope_theta = 10'000;
  std::int64_t window = 0;
  DecoderExperts experts = {};
};
std::span<const DecoderFamily> decoder_families();
/// Null if there is no such family.
const DecoderFamily* find_decoder_family(std::string_view name);

/// Tessera's "model" section (see models::to_json) from a config.json of one of decoder_families().
/// @param source  named in errors, usually the file
/// @throws CorruptCheckpoint on a missing or ill-typed field; Unsupported naming a setting that
///         tessera lacks
Json decoder_config_from_hf(const Json& config, const std::string& source);

/// config.json for a "model" section of one of decoder_families() with weights of `dtype`.
/// @throws InvalidArgument if a field is missing or the family is not one of them
Json decoder_config_to_hf(const Json& model, DType dtype);

}  // namespace tessera::io
