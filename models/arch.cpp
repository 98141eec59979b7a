#include "models/arch.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/decoder_family.h"
#include "io/hf/family.h"
#include "kernels/grouped_matmul.h"
#include "kernels/rotary.h"
#include "models/language_model.h"

namespace tessera::models {
namespace {

using io::Json;
using io::JsonReader;
using nn::NormKind;
using nn::QueryKeyNorm;
using ops::RotaryOptions;
using ops::RotaryScaling;
using Kind = RotaryScaling::Kind;

template <typename E>
struct Name {
  E value;
  const char* name;
};
constexpr Name<NormKind> kNorms[] = {
    {NormKind::Layer, "layer"}, {NormKind::Rms, "rms"}, {NormKind::PlainRms, "plain_rms"}};
constexpr Name<Arch::Mlp> kMlps[] = {{Arch::Mlp::Gelu, "gelu"},
                                     {Arch::Mlp::ReluSquared, "relu_squared"},
                                     {Arch::Mlp::SwiGlu, "swiglu"},
                                     {Arch::Mlp::GeGlu, "geglu"}};
constexpr Name<QueryKeyNorm::Over> kOvers[] = {{QueryKeyNorm::Over::None, "none"},
                                               {QueryKeyNorm::Over::Head, "head"},
                                               {QueryKeyNorm::Over::All, "all"}};
constexpr Name<Kind> kScalings[] = {{Kind::None, "none"},       {Kind::Linear, "linear"},
                                    {Kind::Dynamic, "dynamic"}, {Kind::Llama3, "llama3"},
                                    {Kind::Yarn, "yarn"},       {Kind::LongRope, "longrope"}};

template <typename E, std::size_t n>
const char* name_of(const Name<E> (&names)[n], E value) {
  return std::ranges::find(names, value, &Name<E>::value)->name;
}

// Reads and writes the same fields, each of which may be missing if it has its default.
struct Writer {
  Json& json;
  template <typename T>
  void operator()(const char* key, const T& value, const T& missing) const {
    if (value != missing) json[key] = value;
  }
  template <typename E, std::size_t n>
  void operator()(const char* key, const E& value, const E& missing,
                  const Name<E> (&names)[n]) const {
    if (value != missing) json[key] = name_of(names, value);
  }
  template <typename F>
  void object(const char* key, bool is_there, const F& fields) const {
    if (!is_there) return;
    Json part = Json::object();
    fields(Writer{part});
    json[key] = std::move(part);
  }
};

struct Reader {
  const JsonReader& reader;
  template <typename T>
  void operator()(const char* key, T& value, const T& /*missing*/) const {
    if (!reader.has(key)) return;
    const Json& json = reader.at(key).value();
    const auto wants = [&](bool fits, const char* what) {
      require<CorruptCheckpoint>(fits, "{}: {} must be {}, got {}", reader.where(), key, what,
                                 json.dump());
    };
    if constexpr (std::is_same_v<T, bool>) {
      wants(json.is_boolean(), "true or false");
      value = json.get<bool>();
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
      value = reader.at(key).integer(0);
    } else if constexpr (std::is_floating_point_v<T>) {
      wants(json.is_number(), "a number");
      value = json.get<T>();
    } else {
      value.clear();
      for (std::size_t i = 0; i < reader.at(key).array_size(); ++i) {
        if constexpr (std::is_same_v<typename T::value_type, std::int64_t>) {
          value.push_back(reader.at(key).at(i).integer(0));
        } else {
          wants(json[i].is_number(), "numbers");
          value.push_back(json[i].template get<double>());
        }
      }
    }
  }
  template <typename E, std::size_t n>
  void operator()(const char* key, E& value, const E& /*missing*/,
                  const Name<E> (&names)[n]) const {
    if (!reader.has(key)) return;
    const std::string& text = reader.at(key).string();
    const auto* const found =
        std::ranges::find_if(names, [&](const Name<E>& name) { return text == name.name; });
    require<CorruptCheckpoint>(found != std::end(names), "{}: {} \"{}\" is unknown", reader.where(),
                               key, text);
    value = found->value;
  }
  template <typename F>
  void object(const char* key, bool /*is_there*/, const F& fields) const {
    if (!reader.has(key)) return;
    const JsonReader part = reader.at(key);
    (void)part.object();
    fields(Reader{part});
  }
};

template <typename Visitor, typename Options>
void visit_rotary(const Visitor& visit, const char* key, Options& rotary) {
  const RotaryOptions none;
  visit.object(key, rotary.base > 0, [&](const auto& fields) {
    fields("base", rotary.base, none.base);
    fields("dims", rotary.dims, none.dims);
    fields("reverse", rotary.reverse, none.reverse);
    auto& s = rotary.scaling;
    const RotaryScaling plain;
    fields.object("scaling", s.kind != Kind::None, [&](const auto& scaling) {
      scaling("kind", s.kind, plain.kind, kScalings);
      scaling("factor", s.factor, plain.factor);
      scaling("original", s.original, plain.original);
      scaling("low_freq", s.low_freq, plain.low_freq);
      scaling("high_freq", s.high_freq, plain.high_freq);
      scaling("slow", s.slow, plain.slow);
      scaling("fast", s.fast, plain.fast);
      scaling("truncate", s.truncate, plain.truncate);
      scaling("short_factors", s.short_factors, plain.short_factors);
      scaling("long_factors", s.long_factors, plain.long_factors);
      scaling("magnitude", s.magnitude, plain.magnitude);
    });
  });
}

// All fields but the sizes that every model has. A: Arch or const Arch.
template <typename Visitor, typename A>
void visit_switches(const Visitor& visit, A& arch) {
  const Arch gpt2;
  visit("n_kv_head", arch.n_kv_head, gpt2.n_kv_head);
  visit("head_dim", arch.head_dim, gpt2.head_dim);
  visit("n_inner", arch.n_inner, gpt2.n_inner);
  visit("norm", arch.norm, gpt2.norm, kNorms);
  visit("norm_offset", arch.norm_offset, gpt2.norm_offset);
  visit("pre_norm", arch.pre_norm, gpt2.pre_norm);
  visit("post_norm", arch.post_norm, gpt2.post_norm);
  visit("learned_positions", arch.learned_positions, gpt2.learned_positions);
  visit_rotary(visit, "rotary", arch.rotary);
  visit_rotary(visit, "local_rotary", arch.local_rotary);
  visit("layers_without_rotary", arch.layers_without_rotary, gpt2.layers_without_rotary);
  visit("window", arch.window, gpt2.window);
  visit("full_layers", arch.full_layers, gpt2.full_layers);
  visit.object("qk_norm", arch.qk_norm.over != QueryKeyNorm::Over::None, [&](const auto& fields) {
    const QueryKeyNorm none;
    fields("over", arch.qk_norm.over, none.over, kOvers);
    fields("kind", arch.qk_norm.norm.kind, none.norm.kind, kNorms);
    fields("eps", arch.qk_norm.norm.eps, none.norm.eps);
    fields("offset", arch.qk_norm.norm.offset, none.norm.offset);
    fields("after_rotary", arch.qk_norm.after_rotary, none.after_rotary);
  });
  visit("attention_scale", arch.attention_scale, gpt2.attention_scale);
  visit("attention_softcap", arch.attention_softcap, gpt2.attention_softcap);
  visit("qkv_bias", arch.qkv_bias, gpt2.qkv_bias);
  visit("out_bias", arch.out_bias, gpt2.out_bias);
  visit("mlp", arch.mlp, gpt2.mlp, kMlps);
  visit("mlp_bias", arch.mlp_bias, gpt2.mlp_bias);
  visit.object("experts", arch.experts.count > 0, [&](const auto& fields) {
    const Arch::Experts none;
    fields("count", arch.experts.count, none.count);
    fields("per_token", arch.experts.per_token, none.per_token);
    fields("inner", arch.experts.inner, none.inner);
    fields("renormalize", arch.experts.renormalize, none.renormalize);
    fields("aux_loss", arch.experts.aux_loss, none.aux_loss);
    fields("dense_layers", arch.experts.dense_layers, none.dense_layers);
  });
  visit("embedding_scale", arch.embedding_scale, gpt2.embedding_scale);
  visit("embedding_norm", arch.embedding_norm, gpt2.embedding_norm);
  visit("tied", arch.tied, gpt2.tied);
  visit("logits_softcap", arch.logits_softcap, gpt2.logits_softcap);
  visit("bos_token_id", arch.bos_token, gpt2.bos_token);
  visit("pad_token_id", arch.pad_token, gpt2.pad_token);
  visit("eos_token_ids", arch.eos_tokens, gpt2.eos_tokens);
}

Lora parse_lora(const JsonReader& reader) {
  Lora lora{.rank = reader.at("rank").integer(1), .targets = {}};
  const Reader read{reader};
  read("alpha", lora.alpha, 0.0);
  read("dropout", lora.dropout, 0.0);
  const JsonReader targets = reader.at("targets");
  for (std::size_t i = 0; i < targets.array_size(); ++i)
    lora.targets.push_back(targets.at(i).string());
  lora.base = reader.at("base").string();
  if (reader.has("base_digest")) lora.base_digest = reader.at("base_digest").string();
  return lora;
}

}  // namespace

static_assert(io::kMostExperts == kernels::kMostGroups);

bool Arch::has_experts(std::int64_t layer) const {
  return experts.count > 0 &&
         std::ranges::find(experts.dense_layers, layer) == experts.dense_layers.end();
}

std::int64_t Arch::active_parameters(std::int64_t all) const {
  const std::int64_t inner = experts.inner == 0 ? hidden() : experts.inner;
  for (std::int64_t layer = 0; layer < n_layer; ++layer)
    if (has_experts(layer)) all -= (experts.count - experts.per_token) * 3 * n_embd * inner;
  return all;
}

void Arch::validate() const {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;
  const auto positive = [](const char* name, std::int64_t value) {
    require(value > 0 && value < kMax, "model.{} must be in 1..2^31-1, got {}", name, value);
  };
  const auto not_negative = [](const char* name, double value) {
    require(value >= 0 && value < static_cast<double>(kMax),
            "model.{} must not be negative, got {}", name, value);
  };
  positive("n_layer", n_layer);
  require(n_layer <= 10'000, "model.n_layer is {}; at most 10000 are accepted", n_layer);
  positive("n_head", n_head);
  positive("n_embd", n_embd);
  positive("vocab_size", vocab_size);
  positive("seq_len", seq_len);
  positive("n_kv_head", kv_heads());
  positive("n_inner", hidden());
  require(head_dim > 0 || n_embd % n_head == 0,
          "model.n_embd {} is not divisible by model.n_head {}", n_embd, n_head);
  positive("head_dim", width_of_head());
  require(n_head % kv_heads() == 0, "model.n_head {} is not divisible by model.n_kv_head {}",
          n_head, kv_heads());
  require(norm_eps > 0, "model.layer_norm_eps must be above 0, got {}", norm_eps);
  require(dropout >= 0.0F && dropout < 1.0F, "model.dropout must be in [0, 1), got {}", dropout);
  require(pre_norm || post_norm, "a block of the model needs a norm before or after its parts");
  if (experts.count > 0) {
    positive("n_expert_inner", experts.inner == 0 ? hidden() : experts.inner);
    require(experts.count <= kernels::kMostGroups && experts.per_token >= 1 &&
                experts.per_token <= experts.count,
            "a token can't be routed to {} of {} experts: model.n_expert may be {} at most, and "
            "model.n_expert_used 1 to model.n_expert",
            experts.per_token, experts.count, kernels::kMostGroups);
    require(is_gated() && !mlp_bias && family != "gpt2",
            "experts are gated MLPs without biases, which a {} has not", family);
    not_negative("aux_loss", experts.aux_loss);
  }
  require(experts.aux_loss == 0 || experts.count > 0,
          "model.aux_loss is {}, but the model has no experts", experts.aux_loss);
  not_negative("window", static_cast<double>(window));
  not_negative("attention_scale", attention_scale);
  not_negative("attention_softcap", attention_softcap);
  not_negative("logits_softcap", logits_softcap);
  for (const RotaryOptions* options : {&rotary, &local_rotary})
    if (options->base > 0) (void)ops::rotary_angles(*options, width_of_head(), seq_len);
}

std::string to_json(const Arch& arch) {
  Json json{{"arch", arch.family},
            {"n_layer", arch.n_layer},
            {"n_head", arch.n_head},
            {"n_embd", arch.n_embd},
            {"vocab_size", arch.vocab_size},
            {"seq_len", arch.seq_len},
            {"layer_norm_eps", arch.norm_eps},
            {"dropout", arch.dropout}};
  visit_switches(Writer{json}, arch);
  if (arch.lora)
    json["lora"] = {{"rank", arch.lora->rank},
                    {"alpha", arch.lora->alpha},
                    {"dropout", arch.lora->dropout},
                    {"targets", arch.lora->targets},
                    {"base", arch.lora->base}};
  if (arch.lora && !arch.lora->base_digest.empty())
    json["lora"]["base_digest"] = arch.lora->base_digest;
  return json.dump();
}

Arch parse_arch(const std::string& text, const std::string& source) {
  const Json json = io::parse_json(text, source);
  const JsonReader reader(json, source);
  Arch arch;
  arch.family = reader.at("arch").string();
  require_family(arch.family, source + ": model.arch");
  arch.n_layer = reader.at("n_layer").integer(1);
  arch.n_head = reader.at("n_head").integer(1);
  arch.n_embd = reader.at("n_embd").integer(1);
  arch.vocab_size = reader.at("vocab_size").integer(1);
  arch.seq_len = reader.at("seq_len").integer(1);
  (void)reader.at("layer_norm_eps");
  (void)reader.at("dropout");
  const Reader read{reader};
  read("layer_norm_eps", arch.norm_eps, 0.0);
  read("dropout", arch.dropout, 0.0F);
  visit_switches(read, arch);
  if (reader.has("lora")) arch.lora = parse_lora(reader.at("lora"));
  try {
    arch.validate();
  } catch (const InvalidArgument& error) {
    throw CorruptCheckpoint("{}: {}", source, error.what());
  }
  return arch;
}

Arch arch_of_family(const std::string& family, const Sizes& sizes) {
  require_family(family, "model.arch");
  const io::HfFamily& known = *io::find_hf_family(family);
  if (io::find_decoder_family(family) == nullptr) {  // GPT-2
    Arch arch;
    const auto set = [](std::int64_t& value, std::int64_t given) {
      if (given != 0) value = given;
    };
    set(arch.n_layer, sizes.n_layer);
    set(arch.n_head, sizes.n_head);
    set(arch.n_embd, sizes.n_embd);
    set(arch.vocab_size, sizes.vocab_size);
    set(arch.seq_len, sizes.seq_len);
    const auto fixed = [&](const char* key, std::int64_t given, std::int64_t only) {
      require(given == 0 || given == only, "model.{} of {} is {}, got {}; leave it out", key,
              family, only, given);
    };
    fixed("n_kv_head", sizes.n_kv_head, arch.n_head);
    fixed("head_dim", sizes.head_dim, arch.n_embd / std::max<std::int64_t>(1, arch.n_head));
    fixed("n_inner", sizes.n_inner, 4 * arch.n_embd);
    fixed("n_expert", sizes.n_expert, 0);
    return arch;
  }
  require(sizes.n_kv_head == 0 || sizes.n_head % sizes.n_kv_head == 0,
          "model.n_head {} is not divisible by model.n_kv_head {}", sizes.n_head, sizes.n_kv_head);
  Json config{{"model_type", known.model_type},
              {"num_hidden_layers", sizes.n_layer},
              {"num_attention_heads", sizes.n_head},
              {"num_key_value_heads", sizes.n_kv_head == 0 ? sizes.n_head : sizes.n_kv_head},
              {"hidden_size", sizes.n_embd},
              {"intermediate_size", 1},
              {"vocab_size", sizes.vocab_size},
              {"max_position_embeddings", sizes.seq_len}};
  const auto set = [&config](const char* key, std::int64_t given) {
    if (given != 0) config[key] = given;
  };
  set("num_experts", sizes.n_expert);
  set("num_experts_per_tok", sizes.n_expert_used);
  set("moe_intermediate_size", sizes.n_expert_inner);
  if (sizes.head_dim != 0) {
    config["head_dim"] = sizes.head_dim;
  } else if (sizes.n_embd % std::max<std::int64_t>(1, sizes.n_head) == 0) {
    config["head_dim"] = sizes.n_embd / std::max<std::int64_t>(1, sizes.n_head);
  }
  Arch arch;
  try {
    arch = parse_arch(known.config_from_hf(config, "the keys of the model").dump(),
                      "the keys of the model");
  } catch (const CorruptCheckpoint& error) {
    throw InvalidArgument("{}", error.what());
  }
  constexpr std::int64_t kStep = 64;
  const std::int64_t inner = arch.is_gated() ? (8 * arch.n_embd + 2) / 3 : 4 * arch.n_embd;
  arch.n_inner = sizes.n_inner != 0 ? sizes.n_inner : (inner + kStep - 1) / kStep * kStep;
  const auto takes = [&](const char* key, std::int64_t given, std::int64_t taken) {
    require(given == 0 || given == taken, "a {} has no model.{}; leave it out", family, key);
  };
  takes("n_expert", sizes.n_expert, arch.experts.count);
  takes("n_expert_used", sizes.n_expert_used, arch.experts.per_token);
  takes("n_expert_inner", sizes.n_expert_inner, arch.experts.inner);
  arch.validate();
  return arch;
}

Names names_of(const Arch& arch) {
  if (arch.family != "gpt2") return {};
  Names names;
  names.embed = "wte";
  names.positions = "wpe";
  names.blocks = "h";
  names.norm = "ln_f";
  names.attention_norm = "ln_1";
  names.attention = "attn";
  names.mlp_norm = "ln_2";
  names.in_attention = {.qkv = "c_attn", .out = "c_proj"};
  names.in_mlp = {.up = "c_fc", .down = "c_proj"};
  return names;
}

}  // namespace tessera::models
