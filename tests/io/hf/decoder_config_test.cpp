#include "io/hf/decoder_config.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

Json config_of(const std::string& type, const Json& changes = Json::object()) {
  Json config{
      {"model_type", type},     {"hidden_size", 176},       {"intermediate_size", 40},
      {"num_hidden_layers", 3}, {"num_attention_heads", 4}, {"num_key_value_heads", 2},
      {"head_dim", 44},         {"vocab_size", 61},         {"max_position_embeddings", 64}};
  config.update(changes);
  return config;
}

Json section_of(const std::string& type, const Json& changes = Json::object()) {
  return decoder_config_from_hf(config_of(type, changes), "config.json");
}

TEST_CASE("settings that a family's class ignores change nothing") {
  for (const char* type : {"llama", "gemma", "olmo2", "nanochat"})
    CHECK(section_of(type, {{"sliding_window", 4}}) == section_of(type));
  for (const char* type : {"llama", "qwen3", "olmo3"})
    CHECK(section_of(type, {{"partial_rotary_factor", 0.5}}) == section_of(type));
  CHECK(section_of("gemma3_text", {{"attn_logit_softcapping", 1.0}}) == section_of("gemma3_text"));
  CHECK(section_of("gemma", {{"hidden_act", "gelu"}}) == section_of("gemma"));
  for (const char* type : {"mixtral", "qwen3_moe"})
    CHECK(section_of(type, {{"layer_types", {"full_attention"}}, {"router_jitter_noise", 0.1}}) ==
          section_of(type));
}

TEST_CASE("what an export writes is read back as the same model") {
  const auto check = [](const std::string& type, const Json& changes) {
    const Json section = section_of(type, changes);
    Json exported = decoder_config_to_hf(section, DType::F32);
    CHECK(decoder_config_from_hf(exported, "exported") == section);
    return exported;
  };
  for (const char* kind : {"linear", "dynamic", "llama3", "yarn"}) {
    const Json exported =
        check("llama", {{"rope_scaling", {{"rope_type", kind}, {"factor", 1.0}}}});
    CHECK(exported.at("rope_parameters").at("factor") == 1.0);
  }
  check("phi3", {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}}});
  for (std::int64_t dims = 2; dims < 44; dims += 2) {
    const double part = (static_cast<double>(dims) + 0.5) / 44;
    const Json exported = check("phi3", {{"partial_rotary_factor", part}});
    const double written = exported.at("partial_rotary_factor");
    CHECK(static_cast<std::int64_t>(44 * written) == dims);
  }
}

TEST_CASE("experts: both generations of keys, and layers without experts") {
  const auto experts = [](const std::string& type, const Json& changes) {
    return section_of(type, changes).at("experts");
  };
  for (const char* key : {"num_experts", "num_local_experts"})
    CHECK(experts("qwen3_moe", {{key, 12}}).at("count") == 12);
  CHECK(experts("qwen3_moe", {{"decoder_sparse_step", 2}, {"mlp_only_layers", {1}}})
            .at("dense_layers") == Json({0, 1, 2}));
  CHECK(experts("mixtral", {{"norm_topk_prob", false}}) == experts("mixtral", Json::object()));
  CHECK(experts("olmoe", Json::object()).at("renormalize") == false);
  CHECK(!experts("olmoe", {{"router_aux_loss_coef", 0.5}}).contains("aux_loss"));
  CHECK(experts("olmoe", {{"router_aux_loss_coef", 0.5}, {"output_router_logits", true}})
            .at("aux_loss") == 0.5);
}

TEST_CASE("settings that tessera lacks, and values out of range, are named") {
  CHECK_THROWS_HOLDING(
      Unsupported, "layer_types has \"full_attention\"; tessera's mistral has one window",
      section_of("mistral",
                 {{"layer_types", {"sliding_attention", "full_attention", "sliding_attention"}}}));
  CHECK_THROWS_HOLDING(Unsupported, "\"hidden_act\" is \"gelu\"",
                       section_of("llama", {{"hidden_act", "gelu"}}));
  CHECK_THROWS_HOLDING(Unsupported, "quantization_config",
                       section_of("llama", {{"quantization_config", {{"bits", 4}}}}));
  CHECK_THROWS_HOLDING(Unsupported, "rope_type \"mrope\" is unknown",
                       section_of("qwen2", {{"rope_scaling", {{"type", "mrope"}}}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "rope_type linear needs a factor",
                       section_of("llama", {{"rope_scaling", {{"rope_type", "linear"}}}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "config.json: rms_norm_eps must be above 0",
                       section_of("llama", {{"rms_norm_eps", 0}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "does not divide num_attention_heads 4",
                       section_of("llama", {{"num_key_value_heads", 3}}));
  CHECK_THROWS_HOLDING(Unsupported, "\"shared_expert_intermediate_size\" is 8",
                       section_of("qwen3_moe", {{"shared_expert_intermediate_size", 8}}));
  CHECK_THROWS_HOLDING(Unsupported, "\"clip_qkv\" is 8.0",
                       section_of("olmoe", {{"clip_qkv", 8.0}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "num_local_experts",
                       section_of("mixtral", {{"num_local_experts", 257}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "are more than tessera takes",
                       section_of("llama", {{"head_dim", 2147483647}}));
}

}  // namespace
}  // namespace tessera::io
