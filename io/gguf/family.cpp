#include "io/gguf/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr GgufFamily kFamilies[] = {
    {.model_type = "llama", .arch = "llama", .swaps_heads = true, .any_head_dim = true},
    {.model_type = "mistral", .arch = "llama", .swaps_heads = true, .any_head_dim = true},
    {.model_type = "qwen2", .arch = "qwen2"},
    {.model_type = "qwen3", .arch = "qwen3", .any_head_dim = true},
    {.model_type = "gemma", .arch = "gemma", .norm_offset = 1, .any_head_dim = true},
    {.model_type = "gemma2",
     .arch = "gemma2",
     .norm_offset = 1,
     .post_norm = true,
     .any_head_dim = true,
     .full_every = 2},
    {.model_type = "gemma3_text",
     .arch = "gemma3",
     .norm_offset = 1,
     .post_norm = true,
     .any_head_dim = true,
     .full_every = 6},
    {.model_type = "phi3", .arch = "phi3"},
    {.model_type = "olmo2", .arch = "olmo2", .post_norm = true},
    {.model_type = "gpt2", .arch = "gpt2"},
};

using NamePair = std::pair<std::string_view, std::string_view>;  // Hugging Face's and GGUF's

constexpr std::array kNames = {NamePair{"model.embed_tokens", "token_embd"},
                               NamePair{"model.norm", "output_norm"},
                               NamePair{"lm_head", "output"},
                               NamePair{"transformer.wte", "token_embd"},
                               NamePair{"transformer.wpe", "position_embd"},
                               NamePair{"transformer.ln_f", "output_norm"}};

constexpr std::array kLayerNames = {NamePair{"input_layernorm", "attn_norm"},
                                    NamePair{"self_attn.q_proj", "attn_q"},
                                    NamePair{"self_attn.k_proj", "attn_k"},
                                    NamePair{"self_attn.v_proj", "attn_v"},
                                    NamePair{"self_attn.qkv_proj", "attn_qkv"},
                                    NamePair{"self_attn.o_proj", "attn_output"},
                                    NamePair{"self_attn.q_norm", "attn_q_norm"},
                                    NamePair{"self_attn.k_norm", "attn_k_norm"},
                                    NamePair{"pre_feedforward_layernorm", "ffn_norm"},
                                    NamePair{"post_feedforward_layernorm", "post_ffw_norm"},
                                    NamePair{"mlp.gate_proj", "ffn_gate"},
                                    NamePair{"mlp.up_proj", "ffn_up"},
                                    NamePair{"mlp.gate_up_proj", "ffn_up"},
                                    NamePair{"mlp.down_proj", "ffn_down"},
                                    NamePair{"ln_1", "attn_norm"},
                                    NamePair{"attn.c_attn", "attn_qkv"},
                                    NamePair{"attn.c_proj", "attn_output"},
                                    NamePair{"ln_2", "ffn_norm"},
                                    NamePair{"mlp.c_fc", "ffn_up"},
                                    NamePair{"mlp.c_proj", "ffn_down"}};

template <std::size_t N>
std::string_view find_name(const std::array<NamePair, N>& names, std::string_view name) {
  const auto found = std::ranges::find(names, name, &NamePair::first);
  return found == names.end() ? std::string_view() : found->second;
}

// @param name  without ".weight" or ".bias"
std::string gguf_name(const GgufFamily& family, std::string_view name) {
  if (const std::string_view whole = find_name(kNames, name); !whole.empty())
    return std::string(whole);
  for (const std::string_view prefix : {"model.layers.", "transformer.h."}) {
    if (!name.starts_with(prefix)) continue;
    name.remove_prefix(prefix.size());
    const std::size_t dot = std::min(name.find('.'), name.size());
    const std::string_view layer = name.substr(0, dot),
                           rest = name.substr(std::min(dot + 1, name.size()));
    const std::string_view known = rest == "post_attention_layernorm"
                                       ? (family.post_norm ? "post_attention_norm" : "ffn_norm")
                                       : find_name(kLayerNames, rest);
    if (!known.empty()) return fmt::format("blk.{}.{}", layer, known);
  }
  throw Unsupported("GGUF's {} has no place for the tensor {}", family.arch, name);
}

// ArchSettings of a config.json that config_to_hf wrote.
class ArchSettings {
 public:
  ArchSettings(GgufKeys& keys, const GgufFamily& family, const Json& config)
      : config_(config), keys_(keys), family_(family) {}

  const Json& at(const char* key) const {
    const auto found = config_.find(key);
    require<InternalError>(found != config_.end(), "config.json has no {}", key);
    return *found;
  }
  bool has(const char* key) const {
    const auto found = config_.find(key);
    return found != config_.end() && !found->is_null();
  }
  std::int64_t integer(const char* key) const { return at(key).get<std::int64_t>(); }
  bool flag(const char* key, bool missing = false) const {
    return has(key) ? at(key).get<bool>() : missing;
  }
  [[noreturn]] void refuse(const std::string& setting) const {
    throw Unsupported(
        "a {} model with {} has no equal in GGUF, as readers of its architecture {} "
        "lack that; write it with --format hf",
        family_.model_type, setting, family_.arch);
  }
  void put(const char* key, std::int64_t value) {
    require<Unsupported>(value >= 0 && value <= std::numeric_limits<std::uint32_t>::max(),
                         "{}.{} is {}, which has no 32 bits", family_.arch, key, value);
    keys_.add(name(key), static_cast<std::uint32_t>(value));
  }
  void put(const char* key, double value) { keys_.add(name(key), static_cast<float>(value)); }
  void put(const char* key, const char* value) { keys_.add(name(key), value); }
  void put(const char* key, const std::vector<bool>& values) { keys_.add(name(key), values); }

 private:
  std::string name(const char* key) const { return fmt::format("{}.{}", family_.arch, key); }
  const Json& config_;
  GgufKeys& keys_;
  const GgufFamily& family_;
};

// Factors by which wavelengths are divided. Source: transformers, modeling_rope_utils.py, llama3.
std::vector<float> llama3_factors(const Json& rope, std::int64_t head_dim) {
  const double base = rope.at("rope_theta"), factor = rope.at("factor");
  const double low = rope.at("low_freq_factor"), high = rope.at("high_freq_factor");
  const auto original = rope.at("original_max_position_embeddings").get<double>();
  std::vector<float> factors;
  for (std::int64_t i = 0; i < head_dim; i += 2) {
    const double wavelength =
        2 * std::numbers::pi *
        std::pow(base, static_cast<double>(i) / static_cast<double>(head_dim));
    const double smooth = (original / wavelength - low) / (high - low);
    factors.push_back(static_cast<float>(wavelength < original / high ? 1
                                         : wavelength > original / low
                                             ? factor
                                             : 1 / ((1 - smooth) / factor + smooth)));
  }
  return factors;
}

std::vector<GgufFactors> add_rope(ArchSettings& settings, const GgufFamily& family,
                                  std::int64_t head_dim) {
  const Json& all = settings.at("rope_parameters");
  const Json& rope = all.contains("full_attention") ? all.at("full_attention") : all;
  const std::string type = rope.at("rope_type");
  const bool phi3 = family.arch == "phi3";
  const double part = rope.value("partial_rotary_factor", 1.0);
  if (part != 1 && !phi3) settings.refuse("rotary positions on a part of each head");
  if (family.arch == "llama" || phi3)
    settings.put("rope.dimension_count",
                 static_cast<std::int64_t>(static_cast<double>(head_dim) * part));
  settings.put("rope.freq_base", rope.at("rope_theta").get<double>());
  if (all.contains("sliding_attention"))
    settings.put("rope.freq_base_swa", all.at("sliding_attention").at("rope_theta").get<double>());
  if (phi3)
    settings.put("rope.scaling.original_context_length",
                 settings.integer(settings.has("original_max_position_embeddings")
                                      ? "original_max_position_embeddings"
                                      : "max_position_embeddings"));
  if (type == "default") return {};
  if (type == "llama3" && family.arch == "llama")
    return {{"rope_freqs.weight", llama3_factors(rope, head_dim)}};
  if (type == "longrope" && phi3) {
    settings.put("rope.scaling.attn_factor", rope.at("attention_factor").get<double>());
    return {{"rope_factors_long.weight", rope.at("long_factor").get<std::vector<float>>()},
            {"rope_factors_short.weight", rope.at("short_factor").get<std::vector<float>>()}};
  }
  if (phi3 || (type != "linear" && type != "yarn")) settings.refuse("rotary scaling " + type);
  const double factor = rope.at("factor");
  settings.put("rope.scaling.type", type.c_str());
  settings.put("rope.scaling.factor", factor);
  if (type == "linear") return {};
  if (!rope.value("truncate", true)) settings.refuse("yarn without truncation");
  settings.put("rope.scaling.original_context_length",
               rope.at("original_max_position_embeddings").get<std::int64_t>());
  // Readers compute this value without the key.
  const double usual = factor > 1 ? 0.1 * std::log(factor) + 1 : 1;
  if (const double given = rope.value("attention_factor", usual); std::abs(given - usual) > 1e-6)
    settings.refuse(fmt::format("yarn and attention_factor {}", given));
  settings.put("rope.scaling.yarn_beta_fast", rope.value("beta_fast", 32.0));
  settings.put("rope.scaling.yarn_beta_slow", rope.value("beta_slow", 1.0));
  return {};
}

void add_window_keys(ArchSettings& settings, const GgufFamily& family, std::int64_t layers,
                     std::vector<std::string>& warnings) {
  std::vector<bool> windowed(static_cast<std::size_t>(layers), settings.has("sliding_window"));
  if (settings.has("layer_types")) {
    const Json& types = settings.at("layer_types");
    for (std::size_t i = 0; i < windowed.size(); ++i)
      windowed[i] = types.at(i) == "sliding_attention";
  }
  const bool any = std::ranges::find(windowed, true) != windowed.end();
  const std::int64_t size = settings.has("sliding_window") ? settings.integer("sliding_window") : 0;
  if (family.full_every > 0) {
    settings.put("attention.sliding_window", size);
    bool usual = true;
    for (std::size_t i = 0; i < windowed.size(); ++i)
      usual = usual && windowed[i] == ((i + 1) % static_cast<std::size_t>(family.full_every) != 0);
    if (!usual) settings.put("attention.sliding_window_pattern", windowed);
    return;
  }
  if (family.arch == "phi3") settings.put("attention.sliding_window", any ? size : 0);
  if (any)
    warnings.push_back(fmt::format(
        "layers of this model attend to the last {} tokens, but those of GGUF's {} to all: results "
        "of longer texts differ",
        size, family.arch));
}

void check_scale(const ArchSettings& settings, const GgufFamily& family, std::int64_t layers,
                 std::int64_t width, std::int64_t heads, std::int64_t head_dim) {
  if (!settings.has("query_pre_attn_scalar")) return;
  // Readers of GGUF know the models of 27 billion weights by their layers.
  const std::int64_t wide = family.arch == "gemma2" ? 46 : 62;
  const std::int64_t expected = layers == wide ? width / heads : head_dim;
  if (const auto given = settings.at("query_pre_attn_scalar").get<std::int64_t>();
      given != expected)
    settings.refuse(fmt::format("query_pre_attn_scalar {} (GGUF implies {})", given, expected));
}

}  // namespace

const GgufFamily& gguf_family(std::string_view model_type) {
  std::string known;
  for (const GgufFamily& family : kFamilies) {
    if (family.model_type == model_type) return family;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", family.model_type);
  }
  throw Unsupported("models of model_type {} are not written as GGUF; known are {}", model_type,
                    known);
}

const GgufFamily* find_gguf_arch(std::string_view arch) {
  const auto* const found = std::ranges::find(kFamilies, arch, &GgufFamily::arch);
  return found == std::end(kFamilies) ? nullptr : found;
}

GgufTensor gguf_tensor(const GgufFamily& family, const Json& config, const std::string& name,
                       const Shape& shape) {
  const std::size_t dot = name.rfind('.');
  const std::string_view stem = std::string_view(name).substr(0, dot);
  GgufTensor tensor{gguf_name(family, stem) + name.substr(dot), shape};
  const bool is_norm = name.ends_with("norm.weight");
  if (is_norm) tensor.offset = family.norm_offset;
  tensor.is_f32 = shape.size() <= 1 || stem == "transformer.wpe";
  if (family.swaps_heads && (stem.ends_with("q_proj") || stem.ends_with("k_proj"))) {
    const std::int64_t pairs = config.at("head_dim").get<std::int64_t>() / 2;
    tensor.swap = Swap{2, pairs, shape.size() > 1 ? shape[1] : 1};
  }
  if (family.arch == "gpt2" && stem.starts_with("transformer.h.") && shape.size() == 2) {
    tensor.swap = Swap{shape[0], shape[1], 1};
    std::swap(tensor.shape[0], tensor.shape[1]);
  }
  return tensor;
}

std::vector<GgufFactors> add_gguf_settings(GgufKeys& keys, const GgufFamily& family,
                                           const Json& config, std::vector<std::string>& warnings) {
  ArchSettings settings(keys, family, config);
  settings.put("vocab_size", settings.integer("vocab_size"));
  if (family.arch == "gpt2") {
    const std::int64_t width = settings.integer("n_embd");
    settings.put("block_count", settings.integer("n_layer"));
    settings.put("context_length", settings.integer("n_positions"));
    settings.put("embedding_length", width);
    settings.put("feed_forward_length", 4 * width);
    settings.put("attention.head_count", settings.integer("n_head"));
    settings.put("attention.layer_norm_epsilon", settings.at("layer_norm_epsilon").get<double>());
    return {};
  }
  const std::int64_t layers = settings.integer("num_hidden_layers");
  const std::int64_t width = settings.integer("hidden_size");
  const std::int64_t heads = settings.integer("num_attention_heads");
  const std::int64_t head_dim = settings.integer("head_dim");
  settings.put("block_count", layers);
  settings.put("context_length", settings.integer("max_position_embeddings"));
  settings.put("embedding_length", width);
  settings.put("feed_forward_length", settings.integer("intermediate_size"));
  settings.put("attention.head_count", heads);
  settings.put("attention.head_count_kv", settings.integer("num_key_value_heads"));
  settings.put("attention.layer_norm_rms_epsilon", settings.at("rms_norm_eps").get<double>());
  settings.put("attention.key_length", head_dim);
  settings.put("attention.value_length", head_dim);
  if (!family.any_head_dim && heads * head_dim != width)
    settings.refuse(fmt::format("{} heads of {} and a width of {}", heads, head_dim, width));
  if (family.arch != "llama" && settings.flag("attention_bias"))
    settings.refuse("biases in all projections of attention");
  const bool tied = settings.flag("tie_word_embeddings");
  if (!tied && (family.arch == "gemma" || family.arch == "gemma2"))
    settings.refuse("a head of its own");
  if (tied && family.arch == "olmo2") settings.refuse("a head tied to the embedding");
  check_scale(settings, family, layers, width, heads, head_dim);
  if (family.arch == "gemma2") {
    for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"})
      if (!settings.has(key)) settings.refuse(fmt::format("no {}", key));
    settings.put("attn_logit_softcapping", settings.at("attn_logit_softcapping").get<double>());
  }
  if (settings.has("final_logit_softcapping"))
    settings.put("final_logit_softcapping", settings.at("final_logit_softcapping").get<double>());
  add_window_keys(settings, family, layers, warnings);
  return add_rope(settings, family, head_dim);
}

}  // namespace tessera::io
