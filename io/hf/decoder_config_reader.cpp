#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/decoder_config.h"
#include "io/hf/decoder_family.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxLayers = 10'000;

// Settings of a config.json, of which null means that it is left out.
class Settings {
 public:
  Settings(const Json& json, std::string source) : json_(json), source_(std::move(source)) {}

  const std::string& source() const { return source_; }
  const Json* find(const char* key) const {
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  std::int64_t size(const char* key, std::optional<std::int64_t> missing = {},
                    std::int64_t most = (std::int64_t{1} << 31) - 1) const {
    if (find(key) == nullptr && missing) return *missing;
    return JsonReader(json_, source_).at(key).integer(1, most);
  }
  double positive(const char* key, double missing) const {
    const double value = number(key, missing);
    require<CorruptCheckpoint>(std::isfinite(value) && value > 0, "{}: {} must be above 0, got {}",
                               source_, key, value);
    return value;
  }
  double number(const char* key, double missing) const {
    return typed(key, missing, &Json::is_number, "a number");
  }
  bool flag(const char* key, bool missing) const {
    return typed(key, missing, &Json::is_boolean, "true or false");
  }
  std::string text(const char* key, const char* missing) const {
    return typed(key, std::string(missing), &Json::is_string, "a text");
  }
  std::vector<double> numbers(const char* key) const {
    const JsonReader list = JsonReader(json_, source_).at(key);
    std::vector<double> values;
    for (std::size_t i = 0; i < list.array_size(); ++i) {
      const Json& value = list.at(i).value();
      require<CorruptCheckpoint>(value.is_number() && value.get<double>() >= 0,
                                 "{}: {} must be numbers from 0, got {}", source_, key,
                                 value.dump());
      values.push_back(value.get<double>());
    }
    return values;
  }
  /// An object within, empty if there is none.
  Settings object(const char* key) const {
    static const Json kEmpty = Json::object();
    const Json* const part = find(key);
    require<CorruptCheckpoint>(part == nullptr || part->is_object(), "{}: {} must be an object",
                               source_, key);
    return {part == nullptr ? kEmpty : *part, source_ + ": " + key};
  }
  bool empty() const { return json_.empty(); }
  /// Refuses a setting that is not `supported`.
  void only(const char* key, const Json& supported) const {
    const Json* const found = find(key);
    require<Unsupported>(found == nullptr || *found == supported,
                         "{}: \"{}\" is {}; tessera supports only {} in this family", source_, key,
                         found == nullptr ? "" : found->dump(), supported.dump());
  }

 private:
  template <typename T>
  T typed(const char* key, T missing, bool (Json::*is)() const noexcept, const char* what) const {
    const Json* const found = find(key);
    if (found == nullptr) return missing;
    require<CorruptCheckpoint>((found->*is)(), "{}: {} must be {}, got {}", source_, key, what,
                               found->dump());
    return found->get<T>();
  }
  const Json& json_;
  std::string source_;
};

template <typename T>
void put(Json& json, const char* key, const T& value, const T& missing) {
  if (value != missing) json[key] = value;
}

double magnitude_of_yarn(const Settings& rope, double factor) {
  const auto of = [factor](double scale) {
    return factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
  };
  const double scale = rope.number("mscale", 0), all = rope.number("mscale_all_dim", 0);
  return rope.positive("attention_factor", scale != 0 && all != 0 ? of(scale) / of(all) : of(1.0));
}

Json scaling_of(const Settings& rope, const std::string& type, std::int64_t positions,
                std::int64_t original) {
  Json scaling{{"kind", type}};
  const auto length = static_cast<double>(original);
  if (type == "linear" || type == "dynamic" || type == "llama3")
    require<CorruptCheckpoint>(rope.find("factor") != nullptr, "{}: rope_type {} needs a factor",
                               rope.source(), type);
  if (type == "linear") {
    scaling["factor"] = rope.positive("factor", 1);
  } else if (type == "dynamic") {
    scaling["factor"] = rope.positive("factor", 1);
    scaling["original"] = positions;
  } else if (type == "llama3") {
    scaling["factor"] = rope.positive("factor", 1);
    scaling["original"] = original;
    put(scaling, "low_freq", rope.positive("low_freq_factor", 1), 1.0);
    put(scaling, "high_freq", rope.positive("high_freq_factor", 4), 4.0);
  } else if (type == "yarn") {
    const double factor = rope.positive("factor", static_cast<double>(positions) / length);
    scaling["factor"] = factor;
    scaling["original"] = original;
    put(scaling, "slow", rope.positive("beta_slow", 1), 1.0);
    put(scaling, "fast", rope.positive("beta_fast", 32), 32.0);
    put(scaling, "truncate", rope.flag("truncate", true), true);
    put(scaling, "magnitude", magnitude_of_yarn(rope, factor), 1.0);
  } else if (type == "longrope") {
    const double factor = rope.positive("factor", static_cast<double>(positions) / length);
    const double magnitude =
        factor <= 1.0 ? 1.0 : std::sqrt(1.0 + std::log(factor) / std::log(length));
    scaling["original"] = original;
    scaling["short_factors"] = rope.numbers("short_factor");
    scaling["long_factors"] = rope.numbers("long_factor");
    put(scaling, "magnitude", rope.positive("attention_factor", magnitude), 1.0);
  } else {
    throw Unsupported(
        "{}: rope_type \"{}\" is unknown; tessera has default, linear, dynamic, llama3, yarn and "
        "longrope",
        rope.source(), type);
  }
  return scaling;
}

// @param rope  an object of rope_parameters or the older rope_scaling; may be empty
// @param phi_original  DecoderFamily::original_positions
Json rotary_of(const Settings& config, const Settings& rope, double theta, std::int64_t head_dim,
               std::int64_t positions, std::int64_t phi_original) {
  const bool is_phi3 = phi_original > 0;
  Json rotary{{"base", rope.positive("rope_theta", theta)}};
  const double part =  // ignored by the classes of other families
      is_phi3 ? rope.positive("partial_rotary_factor", config.positive("partial_rotary_factor", 1))
              : 1.0;
  require<CorruptCheckpoint>(part <= 1, "{}: partial_rotary_factor is {}, expected at most 1",
                             rope.source(), part);
  put(rotary, "dims", static_cast<std::int64_t>(static_cast<double>(head_dim) * part), head_dim);
  std::string type = rope.text("rope_type", rope.text("type", "default").c_str());
  if (is_phi3 && (type == "su" || type == "yarn")) type = "longrope";
  if (type == "default") return rotary;
  constexpr const char* kOriginal = "original_max_position_embeddings";
  const std::int64_t original =
      config.size(kOriginal, is_phi3 ? phi_original : rope.size(kOriginal, positions));
  rotary["scaling"] = scaling_of(rope, type, positions, original);
  return rotary;
}

void add_rotary(Json& model, const Settings& config, const DecoderFamily& family) {
  const std::int64_t head_dim = model["head_dim"], positions = model["seq_len"];
  const double theta = config.positive("rope_theta", family.rope_theta);
  const Settings scaling = config.object("rope_scaling"), rope = config.object("rope_parameters");
  if (!family.has_two_ropes) {
    model["rotary"] = rotary_of(config, scaling.empty() ? rope : scaling, theta, head_dim,
                                positions, family.original_positions);
    if (family.reverse_rotary) model["rotary"]["reverse"] = true;
    return;
  }
  // Scaling applies to layers without a window.
  const double local =
      family.local_theta > 0 ? config.positive("rope_local_base_freq", family.local_theta) : theta;
  const Settings full = rope.object("full_attention"), windowed = rope.object("sliding_attention");
  model["rotary"] = rotary_of(config, full.empty() ? scaling : full, theta, head_dim, positions, 0);
  model["local_rotary"] = rotary_of(config, windowed, local, head_dim, positions, 0);
}

// Layers without a window, by layer_types.
std::vector<std::int64_t> listed_full_layers(const Json& types, std::int64_t layers,
                                             const Settings& config, const DecoderFamily& family) {
  require<CorruptCheckpoint>(types.is_array() && types.size() == static_cast<std::size_t>(layers),
                             "{}: layer_types must list the {} layers", config.source(), layers);
  std::vector<std::int64_t> full;
  for (std::int64_t i = 0; i < layers; ++i) {
    const Json& type = types[static_cast<std::size_t>(i)];
    const bool windowed = type == "sliding_attention";
    require<Unsupported>(
        windowed || type == "full_attention",
        "{}: layer_types has {}; tessera knows \"sliding_attention\" and \"full_attention\"",
        config.source(), type.dump());
    require<Unsupported>(windowed || family.windows.layers != DecoderWindows::Layers::All,
                         "{}: layer_types has {}; tessera's {} has one window for all layers",
                         config.source(), type.dump(), family.name);
    if (!windowed) full.push_back(i);
  }
  return full;
}

// The same by the family's rule.
std::vector<std::int64_t> usual_full_layers(const Json& model, const Settings& config,
                                            const DecoderWindows& windows) {
  using Layers = DecoderWindows::Layers;
  const std::int64_t every = windows.full_every_key == nullptr
                                 ? windows.full_every
                                 : config.size(windows.full_every_key, windows.full_every);
  const auto first_windowed = static_cast<std::int64_t>(
      std::clamp<double>(config.number("max_window_layers", 28), 0, kMaxLayers));
  if (windows.layers == Layers::Rotary)
    return model.value("layers_without_rotary", std::vector<std::int64_t>{});
  std::vector<std::int64_t> full;
  for (std::int64_t i = 0; i < model.at("n_layer"); ++i)
    if ((windows.layers == Layers::AllButEvery && (i + 1) % every == 0) ||
        (windows.layers == Layers::Last && i < first_windowed))
      full.push_back(i);
  return full;
}

// Sets "window" and "full_layers".
void add_windows(Json& model, const Settings& config, const DecoderFamily& family) {
  const DecoderWindows& windows = family.windows;
  if (windows.layers == DecoderWindows::Layers::None) return;
  if (windows.has_flag && !config.flag("use_sliding_window", false)) return;
  if (config.find("sliding_window") == nullptr && windows.size == 0) return;
  const std::int64_t window = config.size("sliding_window", windows.size);
  const std::int64_t layers = model["n_layer"];
  const Json* const types = windows.has_list ? config.find("layer_types") : nullptr;
  const std::vector<std::int64_t> full = types != nullptr
                                             ? listed_full_layers(*types, layers, config, family)
                                             : usual_full_layers(model, config, windows);
  if (std::ssize(full) == layers) return;
  model["window"] = window;
  if (!full.empty()) model["full_layers"] = full;
}

void add_layers_without_rotary(Json& model, const Settings& config) {
  const std::int64_t layers = model["n_layer"];
  std::vector<std::int64_t> without;
  if (config.find("no_rope_layers") != nullptr) {
    const std::vector<double> has = config.numbers("no_rope_layers");
    require<CorruptCheckpoint>(has.size() == static_cast<std::size_t>(layers),
                               "{}: no_rope_layers must list the {} layers", config.source(),
                               layers);
    for (std::int64_t i = 0; i < layers; ++i)
      if (has[static_cast<std::size_t>(i)] == 0) without.push_back(i);
  } else {
    const std::int64_t interval = config.size("no_rope_layer_interval", 4);
    for (std::int64_t i = 0; i < layers; ++i)
      if ((i + 1) % interval == 0) without.push_back(i);
  }
  model["layers_without_rotary"] = without;
}

// Sets "experts".
void add_experts(Json& model, const Settings& config, const DecoderFamily& family) {
  const DecoderExperts& known = family.experts;
  if (known.count == 0) return;
  for (const char* key : {"shared_expert_intermediate_size", "n_shared_experts"})
    config.only(key, 0);
  // Readers of one generation write the key of the other.
  const auto count = config.size(
      "num_local_experts", config.size("num_experts", known.count, kMostExperts), kMostExperts);
  Json experts{{"count", count},
               {"per_token", config.size("num_experts_per_tok", known.per_token)}};
  if (known.inner > 0) experts["inner"] = config.size("moe_intermediate_size", known.inner);
  put(experts, "renormalize", known.renormalizes || config.flag("norm_topk_prob", false), true);
  if (config.flag("output_router_logits", false))
    put(experts, "aux_loss", config.number("router_aux_loss_coef", known.aux_loss), 0.0);
  if (known.has_dense_layers) {
    const std::int64_t step = config.size("decoder_sparse_step", 1);
    std::vector<double> named;
    if (config.find("mlp_only_layers") != nullptr) named = config.numbers("mlp_only_layers");
    std::vector<std::int64_t> dense;
    for (std::int64_t i = 0; i < model["n_layer"]; ++i)
      if ((i + 1) % step != 0 || std::ranges::find(named, static_cast<double>(i)) != named.end())
        dense.push_back(i);
    put(experts, "dense_layers", dense, {});
  }
  model["experts"] = std::move(experts);
}

void add_token_ids(Json& model, const Settings& config) {
  const auto ids = [&](const char* key) {
    std::vector<std::int64_t> list;
    const Json* const found = config.find(key);
    if (found == nullptr) return list;
    for (const Json& id : found->is_array() ? *found : Json::array({*found})) {
      require<CorruptCheckpoint>(id.is_number_integer(), "{}: {} must be a token id, got {}",
                                 config.source(), key, found->dump());
      if (id.get<std::int64_t>() >= 0) list.push_back(id.get<std::int64_t>());
    }
    return list;
  };
  for (const char* key : {"bos_token_id", "pad_token_id"}) {
    const std::vector<std::int64_t> id = ids(key);
    if (!id.empty()) model[key] = id.front();
  }
  if (const auto eos = ids("eos_token_id"); !eos.empty()) model["eos_token_ids"] = eos;
}

// Sets "attention_scale" and soft caps, of which null means none.
void add_scales(Json& model, const Settings& config, const Json& json,
                const DecoderFamily& family) {
  if (family.query_scalar)
    model["attention_scale"] =
        1.0 / std::sqrt(config.positive("query_pre_attn_scalar", *family.query_scalar));
  const auto cap = [&](const char* name, const char* key, const std::optional<double>& missing) {
    if (missing) put(model, name, config.number(key, json.contains(key) ? 0 : *missing), 0.0);
  };
  cap("attention_softcap", "attn_logit_softcapping", family.attention_softcap);
  cap("logits_softcap", "final_logit_softcapping", family.logits_softcap);
}

}  // namespace

Json decoder_config_from_hf(const Json& json, const std::string& source) {
  const JsonReader root(json, source);
  const std::string& type = root.at("model_type").string();
  const DecoderFamily* const known = decoder_family_of_type(type);
  require<Unsupported>(known != nullptr, "{}: model_type \"{}\" cannot be imported", source, type);
  const DecoderFamily& family = *known;
  const Settings config(json, source);
  const std::int64_t width = config.size("hidden_size");
  const std::int64_t heads = config.size("num_attention_heads");
  const std::int64_t kv_heads =
      config.size("num_key_value_heads", family.kv_heads == 0 ? heads : family.kv_heads);
  const std::int64_t head_dim =
      config.size("head_dim", family.head_dim == 0 ? std::max<std::int64_t>(1, width / heads)
                                                   : family.head_dim);
  constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - 1;
  require<CorruptCheckpoint>(head_dim <= kMostRows / (heads + 2 * kv_heads),
                             "{}: {} heads of {} numbers are more than tessera takes", source,
                             heads + 2 * kv_heads, head_dim);
  require<CorruptCheckpoint>(heads % kv_heads == 0,
                             "{}: num_key_value_heads {} does not divide num_attention_heads {}",
                             source, kv_heads, heads);
  const Json* const activation = config.find(family.activation_key);
  if (family.activation_alias.empty() || activation == nullptr ||
      *activation != family.activation_alias)
    config.only(family.activation_key, family.activation);
  config.only("use_bidirectional_attention", false);
  config.only("clip_qkv", nullptr);
  require<Unsupported>(config.find("quantization_config") == nullptr,
                       "{}: the weights are quantized (quantization_config), which tessera does "
                       "not read; give the model that they were made from, or, of bitsandbytes, "
                       "save the .dequantize() of transformers' model",
                       source);

  const double eps = config.positive("rms_norm_eps", family.eps);
  Json model{{"arch", family.name},
             {"n_layer", config.size("num_hidden_layers", {}, kMaxLayers)},
             {"n_head", heads},
             {"n_embd", width},
             {"vocab_size", config.size("vocab_size")},
             {"seq_len", config.size("max_position_embeddings")},
             {"layer_norm_eps", eps},
             {"dropout", 0.0},
             {"n_kv_head", kv_heads},
             {"head_dim", head_dim},
             {"n_inner", config.size("intermediate_size")},
             {"norm", family.norm},
             {"learned_positions", false},
             {"mlp", family.mlp}};
  const bool bias = config.flag("attention_bias", false);
  put(model, "qkv_bias", bias || family.always_qkv_bias, true);
  put(model, "out_bias", bias, true);
  put(model, "mlp_bias", config.flag("mlp_bias", false), true);
  put(model, "tied", config.flag("tie_word_embeddings", family.tied), true);
  put(model, "norm_offset", family.norm_offset, 0.0);
  put(model, "pre_norm", family.pre_norm, true);
  put(model, "post_norm", family.post_norm, false);
  put(model, "embedding_norm", family.embedding_norm, false);
  if (family.scales_embedding) model["embedding_scale"] = std::sqrt(static_cast<double>(width));
  if (!family.qk_norm.empty()) {
    Json& norm = model["qk_norm"] = {{"over", family.qk_norm}, {"kind", family.norm}, {"eps", eps}};
    put(norm, "offset", family.norm_offset, 0.0);
    put(norm, "after_rotary", family.qk_norm_after_rotary, false);
  }
  add_scales(model, config, json, family);
  add_experts(model, config, family);
  add_rotary(model, config, family);
  if (family.skips_rotary) add_layers_without_rotary(model, config);
  // A key of null is no window; without a key, the family's.
  if (!(json.contains("sliding_window") && json.at("sliding_window").is_null()))
    add_windows(model, config, family);
  add_token_ids(model, config);
  return model;
}

}  // namespace tessera::io
