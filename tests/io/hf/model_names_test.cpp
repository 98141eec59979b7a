#include "io/hf/model_names.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"

namespace tessera::io {
namespace {

Json config_of(const char* type) {
  return {{"model_type", type},
          {"vocab_size", 5},
          {"hidden_size", 4},
          {"intermediate_size", 3},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"num_experts_per_tok", 2},
          {"max_position_embeddings", 8},
          {"num_local_experts", 2},
          {"head_dim", 2},
          {"moe_intermediate_size", 3},
          {"tie_word_embeddings", false}};
}

ModelNames names_of(const Json& config) {
  const HfFamily& family = *hf_family_of(config);
  return names_of_family(family, family.config_from_hf(config, "config.json"), config,
                         "config.json");
}

const ModelTensor* find(const ModelNames& names, const std::string& name) {
  const auto found = std::ranges::find(names.tensors, name, &ModelTensor::name);
  return found == names.tensors.end() ? nullptr : &*found;
}

using Texts = std::vector<std::string>;

TEST_CASE("the class in config.json determines the head") {
  Json config = config_of("llama");
  CHECK(names_of(config).tensors.size() == 21);
  CHECK(find(names_of(config), "lm_head.weight")->shape == Shape{5, 4});
  config["architectures"] = {"LlamaForCausalLM"};
  CHECK(names_of(config).tensors.size() == 21);
  config["architectures"] = {"LlamaModel"};
  const ModelNames headless = names_of(config);
  CHECK(headless.tensors.size() == 20);
  CHECK(find(headless, "layers.1.mlp.up_proj.weight") != nullptr);
  CHECK(headless.base.empty());
  config["architectures"] = {"LlamaForSequenceClassification"};
  const ModelNames classifier = names_of(config);
  CHECK(classifier.is_open);
  CHECK(classifier.tensors.size() == 20);
  CHECK(find(classifier, "model.norm.weight") != nullptr);
  config = config_of("llama");
  config["tie_word_embeddings"] = true;
  CHECK(find(names_of(config), "lm_head.weight") == nullptr);
}

TEST_CASE("experts have the names of files, and of running models") {
  const std::pair<const char*, const char*> families[] = {
      {"mixtral", "block_sparse_moe.experts.1.w3.weight"},
      {"qwen3_moe", "mlp.experts.1.up_proj.weight"},
      {"olmoe", "mlp.experts.1.up_proj.weight"}};
  for (const auto& family : families) {
    CAPTURE(family.first);
    const ModelNames names = names_of(config_of(family.first));
    const ModelTensor* const tensor = find(names, std::string("model.layers.1.") + family.second);
    REQUIRE(tensor != nullptr);
    CHECK(tensor->shape == Shape{3, 4});
    CHECK(tensor->held == "model.layers.1.mlp.experts.gate_up_proj");
    CHECK(tensor->held_shape == Shape{2, 6, 4});
    CHECK(tensor->expert == 1);
    CHECK(tensor->begin == 3);
  }
  const ModelNames mixtral = names_of(config_of("mixtral"));
  const ModelTensor* const router = find(mixtral, "model.layers.0.block_sparse_moe.gate.weight");
  REQUIRE(router != nullptr);
  CHECK(router->held == "model.layers.0.mlp.gate.weight");
  CHECK(router->expert == -1);
}

TEST_CASE("the layout with all names of the model is found behind any prefix") {
  const ModelNames model{"",
                         {{"model.a.w", {}, "model.a.w", {}},
                          {"model.experts.0.w", {}, "model.stack", {}},
                          {"model.experts.1.w", {}, "model.stack", {}},
                          {"head.w", {}, "head.w", {}}},
                         "model."};
  const auto layout = [&](const Texts& names, bool any_prefix = true) {
    return find_layout(model, names, any_prefix);
  };
  const auto check = [&](const Texts& names, const std::string& prefix, bool is_held,
                         bool lacks_base) {
    const NameLayout found = layout(names);
    CAPTURE(names);
    CHECK(found.is_complete);
    CHECK(found.prefix == prefix);
    CHECK(found.is_held == is_held);
    CHECK(found.lacks_base == lacks_base);
    CHECK(found.found == (is_held ? 3 : 4));
    CHECK(found.others.empty());
  };
  for (const std::string prefix : {"", "model.", "net.", "base_model.model.", "a.b..c."}) {
    const auto with = [&](Texts names) {
      for (std::string& name : names) name = prefix + name;
      return names;
    };
    check(with({"model.a.w", "model.experts.0.w", "model.experts.1.w", "head.w"}), prefix, false,
          false);
    check(with({"model.a.w", "model.stack", "head.w"}), prefix, true, false);
    if (prefix.ends_with("model.")) continue;  // then the base is there
    check(with({"a.w", "experts.0.w", "experts.1.w", "head.w"}), prefix, false, true);
    check(with({"a.w", "stack", "head.w"}), prefix, true, true);
  }
  CHECK(layout({"my_model.a.w", "my_model.stack", "my_model.head.w"}).prefix == "my_model.");

  const NameLayout two = layout({"ema.model.a.w", "ema.model.stack", "ema.head.w", "net.model.a.w",
                                 "net.model.stack", "net.head.w"});
  CHECK(two.prefix == "ema.");
  CHECK(two.others == Texts{"net."});
  const NameLayout part = layout({"net.model.a.w", "net.head.w", "other.head.w"});
  CHECK_FALSE(part.is_complete);
  CHECK(part.prefix == "net.");
  CHECK(part.found == 2);
  CHECK(layout({"net.model.a.w", "net.model.stack", "net.head.w"}, false).found == 0);
  CHECK(layout({}).found == 0);
}

}  // namespace
}  // namespace tessera::io
