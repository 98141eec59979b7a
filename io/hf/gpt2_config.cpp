#include "io/hf/gpt2_config.h"

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/config.h"

namespace tessera::io {
namespace {

constexpr double kDefaultEps = 1e-5;

double number_or(const Json& json, const char* key, double fallback) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number() ? found->get<double>() : fallback;
}

std::int64_t dimension(const Json& model, const char* key) {
  const auto found = model.find(key);
  require(found != model.end() && found->is_number_integer() && *found >= 1 &&
              *found <= (std::int64_t{1} << 31),
          "the model section needs \"{}\" as a whole number from 1 to 2^31, found {}", key,
          found == model.end() ? "nothing" : found->dump());
  return found->get<std::int64_t>();
}

void check_arch(const Json& model) {
  const auto arch = model.find("arch");
  require(arch != model.end() && *arch == "gpt2",
          "the model section has arch {}; this export knows \"gpt2\"",
          arch == model.end() ? "(none)" : arch->dump());
}

// Refuses a setting that differs from tessera's GPT-2.
void require_setting(const Json& config, const char* key, const Json& value,
                     const std::string& source) {
  const auto found = config.find(key);
  require<Unsupported>(found == config.end() || *found == value,
                       "{}: \"{}\" is {}; tessera's GPT-2 supports only {}", source, key,
                       found == config.end() ? "" : found->dump(), value.dump());
}

}  // namespace

Json gpt2_config_from_hf(const Json& config, const std::string& source) {
  const JsonReader root(config, source);
  const std::string& type = root.at("model_type").string();
  require<Unsupported>(type == "gpt2", "{}: model_type \"{}\" cannot be imported; known: \"gpt2\"",
                       source, type);
  const std::int64_t max = std::int64_t{1} << 31;
  const std::int64_t width = root.at("n_embd").integer(1, max);
  const std::int64_t heads = root.at("n_head").integer(1, max);
  require<CorruptCheckpoint>(width % heads == 0, "{}: n_head {} does not divide n_embd {}", source,
                             heads, width);
  if (config.contains("n_inner") && !config["n_inner"].is_null()) {
    require<Unsupported>(config["n_inner"] == 4 * width,
                         "{}: n_inner is {}; tessera's GPT-2 has 4 * n_embd = {}", source,
                         config["n_inner"].dump(), 4 * width);
  }
  if (config.contains("activation_function") &&
      config["activation_function"] != "gelu_pytorch_tanh") {
    require_setting(config, "activation_function", "gelu_new", source);
  }
  require_setting(config, "tie_word_embeddings", true, source);
  require_setting(config, "scale_attn_weights", true, source);
  require_setting(config, "scale_attn_by_inverse_layer_idx", false, source);
  require_setting(config, "add_cross_attention", false, source);
  Json model{{"arch", "gpt2"},
             {"n_layer", root.at("n_layer").integer(1, max)},
             {"n_head", heads},
             {"n_embd", width},
             {"vocab_size", root.at("vocab_size").integer(1, max)},
             {"seq_len",
              root.at(config.contains("n_positions") ? "n_positions" : "n_ctx").integer(1, max)},
             {"layer_norm_eps", number_or(config, "layer_norm_epsilon", kDefaultEps)},
             {"dropout", number_or(config, "resid_pdrop", 0.1)}};
  // Small models often keep the ids of GPT-2's large vocabulary.
  const auto token = [&](const char* key) {
    const auto found = config.find(key);
    const bool is_id = found != config.end() && found->is_number_integer() && *found >= 0 &&
                       *found < model["vocab_size"];
    return is_id ? *found : Json();
  };
  if (const Json bos = token("bos_token_id"); !bos.is_null()) model["bos_token_id"] = bos;
  if (const Json eos = token("eos_token_id"); !eos.is_null())
    model["eos_token_ids"] = Json::array({eos});
  return model;
}

Json gpt2_config_to_hf(const Json& model, DType dtype) {
  check_arch(model);
  const std::string_view torch_dtype = torch_dtype_name(dtype);
  const double dropout = number_or(model, "dropout", 0);
  const std::int64_t vocab = dimension(model, "vocab_size");
  // Id of <|endoftext|>; null unless the vocabulary is GPT-2's, possibly padded by nanoGPT.
  constexpr std::int64_t kGpt2Vocab = 50257, kPaddedVocab = 50304;
  const Json special =
      vocab == kGpt2Vocab || vocab == kPaddedVocab ? Json(kGpt2Vocab - 1) : Json(nullptr);
  const auto ends = model.find("eos_token_ids");
  const Json eos = ends != model.end() && ends->is_array() && !ends->empty()
                       ? (ends->size() == 1 ? ends->front() : *ends)
                       : special;
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"vocab_size", vocab},
          {"n_positions", dimension(model, "seq_len")},
          {"n_ctx", dimension(model, "seq_len")},
          {"n_embd", dimension(model, "n_embd")},
          {"n_layer", dimension(model, "n_layer")},
          {"n_head", dimension(model, "n_head")},
          {"n_inner", nullptr},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", number_or(model, "layer_norm_eps", kDefaultEps)},
          {"resid_pdrop", dropout},
          {"embd_pdrop", dropout},
          {"attn_pdrop", dropout},
          {"bos_token_id", model.contains("bos_token_id") ? model["bos_token_id"] : special},
          {"eos_token_id", eos},
          {"tie_word_embeddings", true},
          {"dtype", torch_dtype},
          {"torch_dtype", torch_dtype}};
}

}  // namespace tessera::io
