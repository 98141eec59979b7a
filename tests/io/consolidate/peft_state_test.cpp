// LoRA adapters in the state of a running model of PEFT.
#include <doctest/doctest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "io/hf/config.h"
#include "io/hf/model_names.h"
#include "io/seal/seal.h"
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

/// A Llama of one layer, and the state of a model of PEFT on it.
struct MergeFixture {
  TempDir dir;
  fs::path base = dir.path() / "base", state = dir.path() / "state", out = dir.path() / "out";
  ConsolidateOptions options;
  std::vector<DcpEntry> weights, adapters;

  MergeFixture() {
    for (const fs::path& each : {base, state}) fs::create_directories(each);
    const Json config = Json::parse(R"({"model_type": "llama", "hidden_size": 8,
        "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 10, "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false})");
    write_text(base / "config.json", config.dump());
    write_text(state / "adapter_config.json",
               R"({"peft_type": "LORA", "r": 2, "lora_alpha": 3, "use_rslora": true,
                   "alpha_pattern": {"down_proj": 5}})");
    const HfFamily& family = *hf_family_of(config);
    const Json section = family.config_from_hf(config, "x");
    for (const ModelTensor& tensor : names_of_family(family, section, config, "x").tensors)
      weights.push_back(entry(tensor.name, {tensor.shape.begin(), tensor.shape.end()}));
    write_dcp_shard(base / kShard, weights);
    for (const auto& [layer, outputs, in] :
         {std::tuple("self_attn.q_proj", 8, 8), std::tuple("mlp.down_proj", 8, 12)}) {
      const std::string name = std::string("base_model.model.model.layers.0.") + layer;
      adapters.push_back(entry(name + ".lora_A.default.weight", {2, in}));
      adapters.push_back(entry(name + ".lora_B.default.weight", {outputs, 2}));
    }
    write_dcp_shard(state / kShard, adapters);
    options.merge_lora = true;
    options.overwrite = true;
  }
  static constexpr const char* kShard = "shard-00001-model-00001-of-00001.safetensors";
  static DcpEntry entry(const std::string& name, const std::vector<std::int64_t>& shape) {
    std::int64_t n = 1;
    for (const std::int64_t extent : shape) n *= extent;
    std::string bytes(static_cast<std::size_t>(4 * n), '\0');
    for (std::int64_t i = 0; i < n; ++i) {
      const auto value = static_cast<float>((i * 7 + std::ssize(name)) % 23 - 11) / 16;
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    }
    return {name, "F32", shape, std::move(bytes)};
  }
  void name_base() {
    const fs::path file = state / "adapter_config.json";
    Json config = Json::parse(read_text(file));
    config["base_model_name_or_path"] = base.string();
    write_text(file, config.dump());
  }
  // The base's weights under their names in the running model.
  std::vector<DcpEntry> base_in_state() const {
    std::vector<DcpEntry> result = weights;
    for (DcpEntry& weight : result) {
      for (const char* layer : {"q_proj.", "down_proj."})
        if (const auto at = weight.name.find(layer); at != std::string::npos)
          weight.name.insert(at + std::strlen(layer), "base_layer.");
      weight.name = "base_model.model." + weight.name;
    }
    return result;
  }
  std::string run(const fs::path& from) {
    consolidate(from, out, options);
    return options.format == ExportFormat::HF ? read_text(out / "model.safetensors") : "";
  }
  // The adapters alone, then their weights with the base's.
  std::string run_twice() {
    consolidate(state, dir.path() / "adapters", {});
    ConsolidateOptions merge;
    merge.merge_lora = true;
    merge.base = base;
    consolidate(dir.path() / "adapters", dir.path() / "merged", merge);
    return read_text(dir.path() / "merged/model.safetensors");
  }
};

TEST_CASE_FIXTURE(MergeFixture,
                  "adapters of a state are merged at once, with the bits of two steps") {
  const std::string merged = run_twice();
  ConsolidateOptions plain;
  plain.overwrite = true;
  consolidate(base, out, plain);
  CHECK(read_text(out / "model.safetensors") != merged);  // of the base alone
  SUBCASE("with a base elsewhere") {
    options.base = base;
    CHECK(run(state) == merged);
    CHECK(Json::parse(read_text(out / "config.json"))["model_type"] == "llama");
    options.format = ExportFormat::DCP;  // any format
    run(state);
  }
  SUBCASE("with the base's weights in the state") {
    const std::vector<DcpEntry> layers = base_in_state();
    adapters.insert(adapters.end(), layers.begin(), layers.end());
    write_dcp_shard(state / kShard, adapters);
    CHECK_THROWS_HOLDING(InvalidArgument, "copy the model's config.json to", run(state));
    fs::copy_file(base / "config.json", state / "config.json");
    CHECK(run(state) == merged);
    options.base = base;
    CHECK(run(state) == merged);
  }
}

TEST_CASE_FIXTURE(MergeFixture, "a base that adapters name is neither replaced nor read damaged") {
  name_base();
  const std::string merged = run(state);
  CHECK(consolidate(state, out, options).tensors == std::ssize(weights));
  // An export becomes the base.
  const fs::path exported = dir.path() / "exported";
  consolidate(base, exported, {});
  fs::remove_all(base);
  fs::rename(exported, base);
  CHECK(run(state) == merged);
  CHECK_THROWS_HOLDING(InvalidArgument, "contains the base", consolidate(state, base, options));
  CHECK_THROWS_HOLDING(InvalidArgument, "is inside the base",
                       consolidate(state, base / "merged", options));
  write_seal(base, false);
  CHECK(run(state) == merged);
  std::string bytes = read_text(base / "model.safetensors");
  bytes.back() ^= 1;
  write_text(base / "model.safetensors", bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "files differ from", run(state));
  options.base = base;
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "files differ from", run(state));
}

TEST_CASE_FIXTURE(MergeFixture,
                  "of several models in a state, adapters have the base of their own") {
  const auto ema_of = [](std::vector<DcpEntry> entries) {
    for (DcpEntry& each : entries) {
      each.name = "ema." + each.name;
      for (std::size_t at = 3; at < each.bytes.size(); at += 4) each.bytes[at] ^= '\x80';  // signs
    }
    return entries;
  };
  const std::vector<DcpEntry> layers = base_in_state();
  std::vector<DcpEntry> all = adapters;
  all.insert(all.end(), layers.begin(), layers.end());
  write_dcp_shard(state / kShard, ema_of(all));
  fs::copy_file(base / "config.json", state / "config.json");
  const std::string ema = run(state);
  const std::vector<DcpEntry> others = ema_of(all), ema_adapters = ema_of(adapters);
  write_dcp_shard(state / kShard, all);
  const std::string model = run(state);
  CHECK(model != ema);
  std::vector<DcpEntry> both = all;
  both.insert(both.end(), others.begin(), others.end());
  write_dcp_shard(state / kShard, both);
  options.names.select = {"ema.*"};
  CHECK(run(state) == ema);
  options.names.select = {"base_model.*"};
  CHECK(run(state) == model);
  // An EMA of what is trained.
  all.insert(all.end(), ema_adapters.begin(), ema_adapters.end());
  write_dcp_shard(state / kShard, all);
  CHECK(run(state) == model);
}

TEST_CASE_FIXTURE(MergeFixture, "a base in the state that is not used is named in a warning") {
  name_base();
  CHECK(plan_consolidation(state, options).warnings.empty());
  const std::vector<DcpEntry> layers = base_in_state();
  adapters.insert(adapters.end(), layers.begin(), layers.end());
  write_dcp_shard(state / kShard, adapters);
  const auto warnings = plan_consolidation(state, options).warnings;
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("config.json is missing: the adapters are merged with " + base.string()) !=
        std::string::npos);
  options.base = base;
  CHECK(plan_consolidation(state, options).warnings.empty());
}

TEST_CASE_FIXTURE(MergeFixture, "adapters of a state that can't be merged are refused") {
  SUBCASE("without a base") {
    CHECK_THROWS_HOLDING(InvalidArgument, "name its directory with --base", run(state));
  }
  SUBCASE("no adapters") {
    options.base = base;
    CHECK_THROWS_HOLDING(InvalidArgument, "holds no LoRA adapters of PEFT; omit --merge-lora",
                         run(base));
  }
  SUBCASE("one adapter twice") {
    options.base = base;
    for (DcpEntry copy : std::vector<DcpEntry>(adapters)) {
      copy.name = "ema." + copy.name;
      adapters.push_back(copy);
    }
    write_dcp_shard(state / kShard, adapters);
    CHECK_THROWS_HOLDING(InvalidArgument, "choose one with --select", run(state));
    options.names.select = {"ema.*"};
    run(state);
  }
  SUBCASE("the base is not replaced") {
    options.base = base;
    CHECK_THROWS_HOLDING(InvalidArgument, "contains the directory of --base",
                         consolidate(state, base, options));
  }
  SUBCASE("optimizer state") {
    options.base = base;
    options.what = ExportWhat::All;
    options.format = ExportFormat::Safetensors;
    CHECK_THROWS_HOLDING(InvalidArgument, "merged weights have no optimizer state", run(state));
  }
}

}  // namespace
}  // namespace tessera::io
