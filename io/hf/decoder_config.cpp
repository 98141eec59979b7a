#include "io/hf/decoder_config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/config.h"

namespace tessera::io {
namespace {

constexpr DecoderFamily kDecoders[] = {
    {.name = "llama", .model_type = "llama", .architecture = "LlamaForCausalLM"},
    {.name = "mistral",
     .model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .kv_heads = 8,
     .window = 4096},
    {.name = "qwen2", .model_type = "qwen2", .architecture = "Qwen2ForCausalLM", .window = 4096},
    {.name = "qwen3",
     .model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .head_dim = 128,
     .window = 4096},
    {.name = "gemma",
     .model_type = "gemma",
     .architecture = "GemmaForCausalLM",
     .head_dim = 256,
     .tied = true},
    {.name = "gemma2",
     .model_type = "gemma2",
     .architecture = "Gemma2ForCausalLM",
     .kv_heads = 4,
     .head_dim = 256,
     .tied = true,
     .window = 4096},
    {.name = "gemma3",
     .model_type = "gemma3_text",
     .architecture = "Gemma3ForCausalLM",
     .kv_heads = 4,
     .head_dim = 256,
     .tied = true,
     .rope_theta = 1e6,
     .window = 4096},
    {.name = "phi3", .model_type = "phi3", .architecture = "Phi3ForCausalLM", .eps = 1e-5},
    {.name = "olmo2", .model_type = "olmo2", .architecture = "Olmo2ForCausalLM", .eps = 1e-5},
    {.name = "olmo3",
     .model_type = "olmo3",
     .architecture = "Olmo3ForCausalLM",
     .eps = 1e-5,
     .rope_theta = 500'000,
     .window = 4096},
    {.name = "smollm3",
     .model_type = "smollm3",
     .architecture = "SmolLM3ForCausalLM",
     .kv_heads = 4,
     .tied = true,
     .rope_theta = 2e6},
    {.name = "mixtral",
     .model_type = "mixtral",
     .architecture = "MixtralForCausalLM",
     .kv_heads = 8,
     .eps = 1e-5,
     .rope_theta = 1e6,
     .experts = {.module = "block_sparse_moe",
                 .gate = "w1",
                 .up = "w3",
                 .down = "w2",
                 .count_key = "num_local_experts",
                 .count = 8,
                 .per_token = 2,
                 .renormalizes = true,
                 .aux_loss = 0.001}},
    {.name = "qwen3_moe",
     .model_type = "qwen3_moe",
     .architecture = "Qwen3MoeForCausalLM",
     .kv_heads = 4,
     .window = 4096,
     .experts =
         {.count = 128, .per_token = 8, .inner = 768, .has_dense_layers = true, .aux_loss = 0.001}},
    {.name = "olmoe",
     .model_type = "olmoe",
     .architecture = "OlmoeForCausalLM",
     .eps = 1e-5,
     .experts = {.count = 64, .per_token = 8, .aux_loss = 0.01}},
    {.name = "nanochat", .model_type = "nanochat", .architecture = "NanoChatForCausalLM"}};

constexpr const char* kWindowed = "sliding_attention";
constexpr const char* kFull = "full_attention";
constexpr std::int64_t kMaxLayers = 10'000;
constexpr double kLocalTheta = 10'000;  // of Gemma 3's windowed layers

bool is_gemma(std::string_view family) { return family.starts_with("gemma"); }

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
Json rotary_of(const Settings& config, const Settings& rope, double theta, std::int64_t head_dim,
               std::int64_t positions, bool is_phi3) {
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
  constexpr std::int64_t kPhi3Original = 4096;
  const std::int64_t original =
      config.size(kOriginal, is_phi3 ? kPhi3Original : rope.size(kOriginal, positions));
  rotary["scaling"] = scaling_of(rope, type, positions, original);
  return rotary;
}

void add_rotary(Json& model, const Settings& config, const DecoderFamily& family) {
  const std::int64_t head_dim = model["head_dim"], positions = model["seq_len"];
  const bool is_phi3 = family.name == "phi3";
  const double theta = config.positive("rope_theta", family.rope_theta);
  const Settings scaling = config.object("rope_scaling"), rope = config.object("rope_parameters");
  if (family.name != "gemma3" && family.name != "olmo3") {
    model["rotary"] =
        rotary_of(config, scaling.empty() ? rope : scaling, theta, head_dim, positions, is_phi3);
    return;
  }
  // Scaling applies to layers without a window.
  const double local =
      family.name == "gemma3" ? config.positive("rope_local_base_freq", kLocalTheta) : theta;
  const Settings full = rope.object(kFull), windowed = rope.object(kWindowed);
  model["rotary"] =
      rotary_of(config, full.empty() ? scaling : full, theta, head_dim, positions, false);
  model["local_rotary"] = rotary_of(config, windowed, local, head_dim, positions, false);
}

// Whether a window applies to all layers.
bool has_one_window(const DecoderFamily& family) {
  return family.name == "mistral" || family.name == "phi3" || family.name == "mixtral" ||
         family.name == "qwen3_moe";
}

// Sets "window" and "full_layers".
void add_windows(Json& model, const Settings& config, const DecoderFamily& family) {
  const std::int64_t layers = model["n_layer"];
  const bool is_qwen = family.name == "qwen2" || family.name == "qwen3";
  const bool optional = is_qwen || family.name == "qwen3_moe" || family.name == "smollm3";
  if (family.window == 0 && !optional && !has_one_window(family)) return;
  if (optional && !config.flag("use_sliding_window", false)) return;
  if (config.find("sliding_window") == nullptr && family.window == 0) return;
  const std::int64_t window = config.size("sliding_window", family.window);
  std::vector<std::int64_t> full;
  const bool one_for_all = has_one_window(family);
  const Json* const types =
      one_for_all && family.name != "mistral" ? nullptr : config.find("layer_types");
  if (types != nullptr) {
    require<CorruptCheckpoint>(
        types->is_array() && types->size() == static_cast<std::size_t>(layers),
        "{}: layer_types must list the {} layers", config.source(), layers);
    for (std::int64_t i = 0; i < layers; ++i) {
      const Json& type = (*types)[static_cast<std::size_t>(i)];
      require<Unsupported>(type == kWindowed || type == kFull,
                           "{}: layer_types has {}; tessera knows \"{}\" and \"{}\"",
                           config.source(), type.dump(), kWindowed, kFull);
      require<Unsupported>(type == kWindowed || !one_for_all,
                           "{}: layer_types has {}; tessera's {} has one window for all layers",
                           config.source(), type.dump(), family.name);
      if (type == kFull) full.push_back(i);
    }
  } else if (!one_for_all) {
    const auto without = model.value("layers_without_rotary", std::vector<std::int64_t>{});
    const std::int64_t pattern = config.size("sliding_window_pattern", 6);
    const auto first_windowed = static_cast<std::int64_t>(
        std::clamp<double>(config.number("max_window_layers", 28), 0, kMaxLayers));
    for (std::int64_t i = 0; i < layers; ++i) {
      const bool is_full = family.name == "gemma2"   ? i % 2 == 1
                           : family.name == "gemma3" ? (i + 1) % pattern == 0
                           : family.name == "olmo3"  ? (i + 1) % 4 == 0
                           : is_qwen                 ? i < first_windowed
                           : family.name == "smollm3"
                               ? std::ranges::find(without, i) == without.end()
                               : false;
      if (is_full) full.push_back(i);
    }
  }
  if (static_cast<std::int64_t>(full.size()) == layers) return;
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

const DecoderFamily* find_decoder(std::string_view key, std::string_view DecoderFamily::*field) {
  const auto* const found = std::ranges::find(kDecoders, key, field);
  return found == std::end(kDecoders) ? nullptr : found;
}

// Activation's key in config.json.
const char* activation_key(const DecoderFamily& family) {
  return family.name == "gemma2" || family.name == "gemma3" ? "hidden_activation" : "hidden_act";
}

Json activation_of(const DecoderFamily& family) {
  return is_gemma(family.name) ? "gelu_pytorch_tanh" : family.name == "nanochat" ? "relu2" : "silu";
}

}  // namespace

std::span<const DecoderFamily> decoder_families() { return kDecoders; }

const DecoderFamily* find_decoder_family(std::string_view name) {
  return find_decoder(name, &DecoderFamily::name);
}

Json decoder_config_from_hf(const Json& json, const std::string& source) {
  const JsonReader root(json, source);
  const std::string& type = root.at("model_type").string();
  const DecoderFamily* const family = find_decoder(type, &DecoderFamily::model_type);
  require<Unsupported>(family != nullptr, "{}: model_type \"{}\" cannot be imported", source, type);
  const Settings config(json, source);
  const std::int64_t width = config.size("hidden_size");
  const std::int64_t heads = config.size("num_attention_heads");
  const std::int64_t kv_heads =
      config.size("num_key_value_heads", family->kv_heads == 0 ? heads : family->kv_heads);
  const std::int64_t head_dim =
      config.size("head_dim", family->head_dim == 0 ? std::max<std::int64_t>(1, width / heads)
                                                    : family->head_dim);
  constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - 1;
  require<CorruptCheckpoint>(head_dim <= kMostRows / (heads + 2 * kv_heads),
                             "{}: {} heads of {} numbers are more than tessera takes", source,
                             heads + 2 * kv_heads, head_dim);
  require<CorruptCheckpoint>(heads % kv_heads == 0,
                             "{}: num_key_value_heads {} does not divide num_attention_heads {}",
                             source, kv_heads, heads);
  // "gelu" is the name of the tanh form in the first configurations of Gemma.
  const Json* const activation = config.find(activation_key(*family));
  if (!(family->name == "gemma" && activation != nullptr && *activation == "gelu"))
    config.only(activation_key(*family), activation_of(*family));
  config.only("use_bidirectional_attention", false);
  config.only("clip_qkv", nullptr);
  require<Unsupported>(config.find("quantization_config") == nullptr,
                       "{}: the weights are quantized (quantization_config), which tessera does "
                       "not read",
                       source);

  const std::string_view name = family->name;
  const double eps = config.positive("rms_norm_eps", family->eps);
  Json model{{"arch", name},
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
             {"norm", name == "nanochat" ? "plain_rms" : "rms"},
             {"learned_positions", false},
             {"mlp", is_gemma(name)       ? "geglu"
                     : name == "nanochat" ? "relu_squared"
                                          : "swiglu"}};
  const bool bias = config.flag("attention_bias", false);
  put(model, "qkv_bias", bias || name == "qwen2", true);
  put(model, "out_bias", bias, true);
  put(model, "mlp_bias", config.flag("mlp_bias", false), true);
  put(model, "tied", config.flag("tie_word_embeddings", family->tied), true);
  if (is_gemma(name)) {
    model["norm_offset"] = 1.0;
    model["embedding_scale"] = std::sqrt(static_cast<double>(width));
  }
  const bool sandwiched = name == "gemma2" || name == "gemma3";
  if (sandwiched || name == "olmo2" || name == "olmo3") model["post_norm"] = true;
  if (name == "olmo2" || name == "olmo3") model["pre_norm"] = false;
  if (name == "olmo2" || name == "olmo3" || name == "olmoe")
    model["qk_norm"] = {{"over", "all"}, {"kind", "rms"}, {"eps", eps}};
  if (name == "qwen3" || name == "qwen3_moe" || name == "gemma3")
    model["qk_norm"] = {{"over", "head"}, {"kind", "rms"}, {"eps", eps}};
  if (name == "gemma3") model["qk_norm"]["offset"] = 1.0;
  if (name == "nanochat") {
    model["qk_norm"] = {
        {"over", "head"}, {"kind", "plain_rms"}, {"eps", eps}, {"after_rotary", true}};
    model["embedding_norm"] = true;
  }
  if (sandwiched) {
    model["attention_scale"] = 1.0 / std::sqrt(config.positive("query_pre_attn_scalar", 256));
    const double missing = json.contains("attn_logit_softcapping") ? 0 : 50;
    if (name == "gemma2")  // Gemma 3's class ignores the setting
      put(model, "attention_softcap", config.number("attn_logit_softcapping", missing), 0.0);
  }
  if (sandwiched || name == "nanochat") {
    const bool is_given = json.contains("final_logit_softcapping");
    const double missing = is_given ? 0 : name == "gemma2" ? 30 : name == "nanochat" ? 15 : 0;
    put(model, "logits_softcap", config.number("final_logit_softcapping", missing), 0.0);
  }
  add_experts(model, config, *family);
  add_rotary(model, config, *family);
  if (name == "nanochat") model["rotary"]["reverse"] = true;
  if (name == "smollm3") add_layers_without_rotary(model, config);
  // A key of null is no window; without a key, the family's.
  if (!(json.contains("sliding_window") && json.at("sliding_window").is_null()))
    add_windows(model, config, *family);
  add_token_ids(model, config);
  return model;
}

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
  const bool by_layer = model.contains("local_rotary");
  config["rope_theta"] = full.at("rope_theta");
  const bool is_default = full.at("rope_type") == "default";
  config["rope_scaling"] = is_default ? Json(nullptr) : full;
  config["rope_parameters"] = full;
  if (full.contains("partial_rotary_factor"))
    config["partial_rotary_factor"] = full.at("partial_rotary_factor");
  if (by_layer) {
    const Json local = rope_parameters(model.at("local_rotary"), head_dim);
    config["rope_parameters"] = {{kFull, full}, {kWindowed, local}};
    if (family.name == "gemma3") config["rope_local_base_freq"] = local.at("rope_theta");
  }
  const auto scaling = model.at("rotary").find("scaling");
  if (scaling == model.at("rotary").end()) return;
  if (scaling->at("kind") == "dynamic") config["max_position_embeddings"] = scaling->at("original");
  if (family.name == "phi3") config["original_max_position_embeddings"] = scaling->at("original");
}

void set_windows(Json& config, const Json& model, const DecoderFamily& family) {
  const std::int64_t layers = model.at("n_layer"), window = model.value("window", std::int64_t{0});
  const std::vector<std::int64_t> full = model.value("full_layers", std::vector<std::int64_t>{});
  const std::string_view name = family.name;
  if (family.window == 0 && !has_one_window(family) && name != "smollm3") return;
  // Classes that always make both masks need a number, even if no layer has a window.
  const bool needs_one = name == "gemma2" || name == "gemma3" || name == "olmo3";
  config["sliding_window"] = window > 0  ? Json(window)
                             : needs_one ? Json(family.window)
                                         : Json(nullptr);
  if (name == "qwen2" || name == "qwen3" || name == "qwen3_moe" || name == "smollm3")
    config["use_sliding_window"] = window > 0;
  if (has_one_window(family)) {
    require(full.empty(), "a {} model has one window for all layers, but {} layers have none", name,
            full.size());
    return;
  }
  Json types = Json::array();
  for (std::int64_t i = 0; i < layers; ++i) {
    const bool windowed = window > 0 && std::ranges::find(full, i) == full.end();
    types.push_back(windowed ? kWindowed : kFull);
  }
  config["layer_types"] = types;
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
  const DecoderFamily* const family = find_decoder_family(arch);
  require(family != nullptr, "the model section has arch \"{}\", which this export does not know",
          arch);
  try {
    const std::string_view name = family->name;
    const std::string_view torch_dtype = torch_dtype_name(dtype);
    const bool out_bias = model.value("out_bias", true), qkv_bias = model.value("qkv_bias", true);
    Json config{{"architectures", {family->architecture}},
                {"model_type", family->model_type},
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
    config[activation_key(*family)] = activation_of(*family);
    if (name == "gemma") config["hidden_activation"] = activation_of(*family);
    if (name != "qwen2") config["attention_bias"] = qkv_bias;
    require(qkv_bias == out_bias || name == "qwen2",
            "a {} model has biases in all projections of attention or in none", name);
    if (name == "llama" || name == "smollm3") config["mlp_bias"] = model.value("mlp_bias", true);
    if (const Json eos = model.value("eos_token_ids", Json::array()); !eos.empty())
      config["eos_token_id"] = eos.size() == 1 ? eos.front() : eos;
    if (name == "gemma2" || name == "gemma3") {
      const double scale = model.at("attention_scale");
      config["query_pre_attn_scalar"] = std::llround(1.0 / (scale * scale));
      const auto cap = [&](const char* key) {
        return model.contains(key) ? model.at(key) : Json(nullptr);
      };
      config["attn_logit_softcapping"] = cap("attention_softcap");
      config["final_logit_softcapping"] = cap("logits_softcap");
    }
    if (name == "nanochat")
      config["final_logit_softcapping"] =
          model.contains("logits_softcap") ? model.at("logits_softcap") : Json(nullptr);
    if (name == "smollm3") {
      const auto without = model.value("layers_without_rotary", std::vector<std::int64_t>{});
      Json has = Json::array();
      for (std::int64_t i = 0; i < model.at("n_layer"); ++i)
        has.push_back(std::ranges::find(without, i) == without.end() ? 1 : 0);
      config["no_rope_layers"] = has;
    }
    set_experts(config, model, *family);
    set_rope(config, model, *family);
    set_windows(config, model, *family);
    return config;
  } catch (const Json::exception& error) {
    throw InvalidArgument("the model section of a {} model is incomplete: {}", arch, error.what());
  }
}

}  // namespace tessera::io
