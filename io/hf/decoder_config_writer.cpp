#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/config.h"
#include "io/hf/decoder_config.h"
#include "io/hf/decoder_family.h"

namespace tessera::io {
namespace {

Json rope_parameters(const Json& rotary, std::int64_t head_dim) {
  Json rope{{"rope_type", "default"}, {"rope_theta", rotary.at("base")}};
  if (rotary.contains("dims")) {
    const std::int64_t dims = rotary.at("dims");
    double part = static_cast<double>(dims) / static_cast<double>(head_dim);
    // Readers round the product down.
    while (static_cast<std::int64_t>(static_cast<double>(head_dim) * part) < dims)
      part = std::nextafter(part, 1.0);
    rope["partial_rotary_factor"] = part;
  }
  const auto scaling = rotary.find("scaling");
  if (scaling == rotary.end()) return rope;
  const std::string kind = scaling->at("kind");
  rope["rope_type"] = kind;
  const auto copy = [&](const char* theirs, const char* ours) {
    if (scaling->contains(ours)) rope[theirs] = scaling->at(ours);
  };
  if (kind != "longrope") rope["factor"] = scaling->value("factor", 1.0);
  if (kind != "dynamic") copy("original_max_position_embeddings", "original");
  if (kind == "llama3") {
    rope["low_freq_factor"] = scaling->value("low_freq", 1.0);
    rope["high_freq_factor"] = scaling->value("high_freq", 4.0);
  }
  copy("beta_slow", "slow");
  copy("beta_fast", "fast");
  copy("truncate", "truncate");
  copy("short_factor", "short_factors");
  copy("long_factor", "long_factors");
  if (kind == "yarn" || kind == "longrope")
    rope["attention_factor"] = scaling->value("magnitude", 1.0);
  return rope;
}

// Both generations of keys, because a reader of one silently ignores those of the other.
void set_rope(Json& config, const Json& model, const DecoderFamily& family) {
  const std::int64_t head_dim = model.at("head_dim");
  const Json full = rope_parameters(model.at("rotary"), head_dim);
  config["rope_theta"] = full.at("rope_theta");
  const bool is_default = full.at("rope_type") == "default";
  config["rope_scaling"] = is_default ? Json(nullptr) : full;
  config["rope_parameters"] = full;
  if (full.contains("partial_rotary_factor"))
    config["partial_rotary_factor"] = full.at("partial_rotary_factor");
  if (family.has_two_ropes) {
    const Json local = rope_parameters(model.at("local_rotary"), head_dim);
    config["rope_parameters"] = {{"full_attention", full}, {"sliding_attention", local}};
    if (family.local_theta > 0) config["rope_local_base_freq"] = local.at("rope_theta");
  }
  const auto scaling = model.at("rotary").find("scaling");
  if (scaling == model.at("rotary").end()) return;
  if (scaling->at("kind") == "dynamic") config["max_position_embeddings"] = scaling->at("original");
  if (family.original_positions > 0 && scaling->contains("original"))
    config["original_max_position_embeddings"] = scaling->at("original");
}

void set_windows(Json& config, const Json& model, const DecoderFamily& family) {
  const DecoderWindows& windows = family.windows;
  if (windows.layers == DecoderWindows::Layers::None) return;
  const std::int64_t layers = model.at("n_layer"), window = model.value("window", std::int64_t{0});
  const std::vector<std::int64_t> full = model.value("full_layers", std::vector<std::int64_t>{});
  config["sliding_window"] = window > 0           ? Json(window)
                             : windows.needs_size ? Json(windows.size)
                                                  : Json(nullptr);
  if (windows.has_flag) config["use_sliding_window"] = window > 0;
  if (windows.layers == DecoderWindows::Layers::All) {
    require(full.empty(), "a {} model has one window for all layers, but {} layers have none",
            family.name, full.size());
    return;
  }
  Json types = Json::array();
  for (std::int64_t i = 0; i < layers; ++i) {
    const bool windowed = window > 0 && std::ranges::find(full, i) == full.end();
    types.push_back(windowed ? "sliding_attention" : "full_attention");
  }
  config["layer_types"] = types;
}

void set_scales(Json& config, const Json& model, const DecoderFamily& family) {
  if (family.query_scalar) {
    const double scale = model.at("attention_scale");
    config["query_pre_attn_scalar"] = std::llround(1.0 / (scale * scale));
  }
  const auto cap = [&](const char* key, const char* name, const std::optional<double>& missing) {
    if (missing) config[key] = model.contains(name) ? model.at(name) : Json(nullptr);
  };
  cap("attn_logit_softcapping", "attention_softcap", family.attention_softcap);
  cap("final_logit_softcapping", "logits_softcap", family.logits_softcap);
}

void set_layers_without_rotary(Json& config, const Json& model) {
  const auto without = model.value("layers_without_rotary", std::vector<std::int64_t>{});
  Json has = Json::array();
  for (std::int64_t i = 0; i < model.at("n_layer"); ++i)
    has.push_back(std::ranges::find(without, i) == without.end() ? 1 : 0);
  config["no_rope_layers"] = has;
}

void set_experts(Json& config, const Json& model, const DecoderFamily& family) {
  const DecoderExperts& known = family.experts;
  if (known.count == 0) return;
  const Json& experts = model.at("experts");
  const bool renormalize = experts.value("renormalize", true);
  const double aux_loss = experts.value("aux_loss", 0.0);
  config[std::string(known.count_key)] = experts.at("count");
  config["num_experts_per_tok"] = experts.at("per_token");
  config["output_router_logits"] = aux_loss > 0;
  config["router_aux_loss_coef"] = aux_loss > 0 ? aux_loss : known.aux_loss;
  if (!known.renormalizes) config["norm_topk_prob"] = renormalize;
  require(renormalize || !known.renormalizes, "a {} model renormalizes the weights of experts",
          family.name);
  if (known.inner > 0)
    config["moe_intermediate_size"] = experts.at("inner");
  else
    require(!experts.contains("inner") || experts.at("inner") == model.at("n_inner"),
            "a {} model has no other width of experts than model.n_inner", family.name);
  const Json dense = experts.value("dense_layers", Json::array());
  require(known.has_dense_layers || dense.empty(), "a {} model has experts in all layers",
          family.name);
  if (!known.has_dense_layers) return;
  config["decoder_sparse_step"] = 1;
  config["mlp_only_layers"] = dense;
}

}  // namespace

Json decoder_config_to_hf(const Json& model, DType dtype) {
  const std::string arch = model.value("arch", std::string());
  const DecoderFamily* const known = find_decoder_family(arch);
  require(known != nullptr, "the model section has arch \"{}\", which this export does not know",
          arch);
  const DecoderFamily& family = *known;
  try {
    const std::string_view torch_dtype = torch_dtype_name(dtype);
    const bool out_bias = model.value("out_bias", true), qkv_bias = model.value("qkv_bias", true);
    Json config{{"architectures", {family.architecture}},
                {"model_type", family.model_type},
                {"vocab_size", model.at("vocab_size")},
                {"hidden_size", model.at("n_embd")},
                {"intermediate_size", model.at("n_inner")},
                {"num_hidden_layers", model.at("n_layer")},
                {"num_attention_heads", model.at("n_head")},
                {"num_key_value_heads", model.at("n_kv_head")},
                {"head_dim", model.at("head_dim")},
                {"max_position_embeddings", model.at("seq_len")},
                {"rms_norm_eps", model.at("layer_norm_eps")},
                {"tie_word_embeddings", model.value("tied", true)},
                {"attention_dropout", 0.0},
                {"initializer_range", 0.02},
                {"use_cache", true},
                {"bos_token_id", model.value("bos_token_id", Json(nullptr))},
                {"pad_token_id", model.value("pad_token_id", Json(nullptr))},
                {"eos_token_id", nullptr},
                {"dtype", torch_dtype},
                {"torch_dtype", torch_dtype}};
    for (const char* key : {family.activation_key, family.second_activation_key})
      if (key != nullptr) config[key] = family.activation;
    if (!family.always_qkv_bias) {
      config["attention_bias"] = qkv_bias;
      require(qkv_bias == out_bias,
              "a {} model has biases in all projections of attention or in none", family.name);
    }
    if (family.writes_mlp_bias) config["mlp_bias"] = model.value("mlp_bias", true);
    if (const Json eos = model.value("eos_token_ids", Json::array()); !eos.empty())
      config["eos_token_id"] = eos.size() == 1 ? eos.front() : eos;
    set_scales(config, model, family);
    if (family.skips_rotary) set_layers_without_rotary(config, model);
    set_experts(config, model, family);
    set_rope(config, model, family);
    set_windows(config, model, family);
    return config;
  } catch (const Json::exception& error) {
    throw InvalidArgument("the model section of a {} model is incomplete: {}", arch, error.what());
  }
}

}  // namespace tessera::io
