// LoRA adapters in the state of a running model of PEFT.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "io/source/find_sharded.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const std::string kLayer = "base_model.model.model.layers.0.self_attn.q_proj.";

struct Fixture {
  TempDir dir;
  fs::path source = dir.path() / "source", out = dir.path() / "out";
  ConsolidateOptions options;
  std::vector<DcpEntry> entries{
      {"_orig_mod." + kLayer + "base_layer.weight", "F32", {1, 1}, "base"},
      {"_orig_mod." + kLayer + "lora_A.default.weight", "F32", {2, 1}, "AAAAaaaa"},
      {"_orig_mod." + kLayer + "lora_B.default.weight", "F32", {1, 2}, "BBBBbbbb"},
      {"_orig_mod." + kLayer + "lora_magnitude_vector.default.weight", "F32", {1}, "mmmm"},
      {"_orig_mod.base_model.model.lm_head.modules_to_save.default.weight", "F32", {1}, "head"},
      {"_orig_mod.base_model.model.lm_head.original_module.weight", "F32", {1}, "old!"}};

  Fixture() {
    fs::create_directories(source);
    set_config(R"({"peft_type": "LORA", "r": 2, "base_model_name_or_path": "x"})");
  }
  void set_config(const char* text) { write_text(source / "adapter_config.json", text); }
  ConsolidateReport run() {
    write_dcp_shard(source / "shard-00001-model-00001-of-00001.safetensors", entries);
    return consolidate(source, out, options);
  }
};

TEST_CASE_FIXTURE(Fixture, "adapters of a running model are written in PEFT's format") {
  const ConsolidateReport report = run();
  CHECK(report.skipped.size() == 2);  // weights of the base
  CHECK(names_in(out) ==
        std::vector<std::string>{"adapter_config.json", "adapter_model.safetensors"});
  const SafetensorsReader reader(out / "adapter_model.safetensors");
  std::vector<std::string> names;
  for (const auto& tensor : reader.header().tensors) names.push_back(tensor.name);
  CHECK(names == std::vector<std::string>{"base_model.model.lm_head.weight",
                                          kLayer + "lora_A.weight", kLayer + "lora_B.weight",
                                          kLayer + "lora_magnitude_vector"});
  CHECK(read_text(out / "adapter_model.safetensors").ends_with("headAAAAaaaaBBBBbbbbmmmm"));
  CHECK(Json::parse(read_text(out / "adapter_config.json"))["base_model_name_or_path"] == "x");
}

TEST_CASE_FIXTURE(Fixture, "an adapter needs its configuration and both halves") {
  SUBCASE("another rank") {
    set_config(R"({"peft_type": "LORA", "r": 3})");
    CHECK_THROWS_HOLDING(InvalidArgument, "has rank 3", run());
    set_config(R"({"peft_type": "LORA", "r": 3, "rank_pattern": {"q_proj": 2}})");
    run();
  }
  SUBCASE("trained weights that are not of the adapters") {
    set_config(R"({"peft_type": "LORA", "r": 2, "bias": "all"})");
    CHECK_THROWS_HOLDING(Unsupported, "\"bias\": \"all\"", run());
    set_config(R"({"peft_type": "LORA", "r": 2, "trainable_token_indices": [1]})");
    CHECK_THROWS_HOLDING(Unsupported, "trainable_token_indices", run());
    set_config(R"({"peft_type": "LORA", "r": 2, "bias": "none", "trainable_token_indices": null})");
    run();
    CHECK(open_foreign(source)->tensors().size() == entries.size());  // the shards, not adapters
  }
  SUBCASE("another method") {
    set_config(R"({"peft_type": "IA3"})");
    CHECK_THROWS_HOLDING(InvalidArgument, "is no adapter_config.json of LoRA", run());
  }
  SUBCASE("none") {
    fs::remove(source / "adapter_config.json");
    CHECK_THROWS_HOLDING(InvalidArgument, "give it with --config FILE", run());
  }
  SUBCASE("one half") {
    entries.erase(entries.begin() + 2);
    CHECK_THROWS_HOLDING(InvalidArgument, "lora_A.weight without " + kLayer + "lora_B.weight",
                         run());
  }
  SUBCASE("two adapters") {
    entries.push_back({"_orig_mod." + kLayer + "lora_A.other.weight", "F32", {2, 1}, "12345678"});
    entries.push_back({"_orig_mod." + kLayer + "lora_B.other.weight", "F32", {1, 2}, "12345678"});
    CHECK_THROWS_HOLDING(InvalidArgument, "choose one with --select '*.other.*'", run());
    options.names.select = {"*.other.*"};
    run();
    const SafetensorsReader reader(out / "adapter_model.safetensors");
    CHECK(reader.header().tensors.size() == 2);
  }
}

}  // namespace
}  // namespace tessera::io
