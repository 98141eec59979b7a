// Shards of models that tessera knows: their tensors are checked, and get the names of files.

#include "io/consolidate/sharded.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/model_names.h"
#include "io/hf/model_source.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

using Names = std::set<std::string>;

ModelNames names_of(const Json& config) {
  const HfFamily& family = *hf_family_of(config);
  return names_of_family(family, family.config_from_hf(config, "config.json"), config,
                         "config.json");
}

Names disk_names(const ModelNames& model) {
  Names names;
  for (const ModelTensor& tensor : model.tensors) names.insert(tensor.name);
  return names;
}

/// Shards of one file, with a config.json.
struct Shards {
  TempDir dir;
  fs::path source = dir.path() / "source", out = dir.path() / "out";
  ConsolidateOptions options;
  Json config = {{"architectures", {"LlamaForCausalLM"}},
                 {"model_type", "llama"},
                 {"vocab_size", 5},
                 {"hidden_size", 4},
                 {"intermediate_size", 3},
                 {"num_hidden_layers", 1},
                 {"num_attention_heads", 2},
                 {"max_position_embeddings", 8},
                 {"tie_word_embeddings", false}};
  std::map<std::string, DcpEntry> entries;

  Shards() {
    options.shards = 1;
    fs::create_directory(source);
  }
  /// Adds a float32 tensor whose values count up from `start`.
  void add(const std::string& name, const Shape& shape, int start = 0) {
    std::vector<float> values(static_cast<std::size_t>(numel(shape)));
    for (float& value : values) value = static_cast<float>(start++);
    entries[name] = {name,
                     "F32",
                     {shape.begin(), shape.end()},
                     std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4)};
  }
  /// Adds the tensors that the configuration has, as files or as running models name them.
  void add_all(const std::string& prefix, bool held = false) {
    int start = 0;
    for (const ModelTensor& tensor : names_of(config).tensors)
      add(prefix + (held ? tensor.held : tensor.name), held ? tensor.held_shape : tensor.shape,
          start += 100);
  }
  void write() const {
    write_text(source / "config.json", config.dump());
    std::vector<DcpEntry> list;
    for (const auto& [name, entry] : entries) list.push_back(entry);
    write_dcp_shard(source / "shard-00001-model-00001-of-00001.safetensors", list);
  }
  ConsolidatePlan plan() const {
    write();
    return plan_consolidation(source, options);
  }
  Names names() const {
    Names found;
    for (const auto& tensor : plan().tensors) found.insert(tensor.name);
    return found;
  }
  void refuse(const std::string& text) const {
    CHECK_THROWS_HOLDING(InvalidArgument, text, plan());
  }
};

TEST_CASE("the weights of every family are found behind any prefix, without a warning") {
  int families = 0;
  for (const fs::path& path : list_directory(test::source_path("tests/golden/families"))) {
    const Json golden = Json::parse(read_text(path));
    for (const std::string prefix :
         {"", "model.", "net.", "module.", "base_model.model.", "state.model.x._forward_module."}) {
      for (const bool held : {false, true}) {
        CAPTURE(path);
        CAPTURE(prefix);
        Shards shards;
        shards.config = golden.at("cases").front().at("config");
        shards.add_all(prefix, held);
        shards.add(prefix + "model.layers.0.self_attn.rotary_emb.inv_freq", {4});
        const Names expected = disk_names(names_of(shards.config));
        CHECK(shards.names() == expected);
        CHECK(shards.plan().warnings.empty());
        // The number of shards need not be known, as all tensors are.
        shards.options.shards = {};
        CHECK(shards.plan().warnings.empty());
        // Tessera's own commands read the same.
        CHECK(open_model(shards.source)->tensors().size() > 0);
      }
    }
    ++families;
  }
  CHECK(families == 15);
}

TEST_CASE_FIXTURE(Shards, "model. is stripped once or not at all, from safetensors too") {
  add_all("model.");
  const Names expected = disk_names(names_of(config));
  options.format = ExportFormat::Safetensors;
  CHECK(names() == expected);
  options.names.strip_wrappers = false;
  CHECK(names().contains("model.model.norm.weight"));
  CHECK(names().contains("model.lm_head.weight"));
  options.names.prefixes = {"model."};
  CHECK(names() == expected);
}

TEST_CASE_FIXTURE(Shards, "checkpoints of the model without its head have no prefix") {
  config["tie_word_embeddings"] = true;
  for (const ModelTensor& tensor : names_of(config).tensors)
    add("net." + tensor.name.substr(std::string("model.").size()), tensor.shape);
  CHECK(names() == disk_names(names_of(config)));
  config["architectures"] = {"LlamaModel"};
  CHECK(names().contains("layers.0.mlp.up_proj.weight"));
  CHECK(names() == disk_names(names_of(config)));
}

TEST_CASE_FIXTURE(Shards, "a head that tessera does not know is exported") {
  config["architectures"] = {"LlamaForSequenceClassification"};
  add_all("model.");
  add("model.score.weight", {2, 4});
  CHECK(names().contains("score.weight"));
  CHECK(names().size() == disk_names(names_of(config)).size() + 1);
  add("model.model.layers.7.x", {2});
  refuse("unexpected: model.layers.7.x [2]");
}

TEST_CASE_FIXTURE(Shards, "other tensors, missing ones and other shapes are listed with advice") {
  add_all("net.");
  add("loss.weight", {2});  // outside of the model
  const ConsolidatePlan good = plan();
  CHECK(good.skipped[0].why == "outside of the model, which is in net.");
  add("net.lr", {1});
  refuse("unexpected: lr [1]\n  Tensors that are not of the model are left out with --exclude");
  options.names.exclude = {"*.lr"};
  CHECK(names() == disk_names(names_of(config)));
  entries.erase("net.model.norm.weight");
  add("net.model.final_norm.weight", {4});
  refuse("the tensors of " + source.string() + " in net. are not those of " +
         (source / "config.json").string() +
         ":\n  missing: model.norm.weight [4]\n  unexpected: model.final_norm.weight [4]\n  If "
         "these are the same tensors, change their names with --rename 's/OLD/NEW/'.");
  options.names.renames = {"s/final_norm/norm/"};
  CHECK(names() == disk_names(names_of(config)));
  add("net.model.embed_tokens.weight", {6, 4});
  refuse(
      "shape: model.embed_tokens.weight is [6, 4], expected [5, 4]\n  Is the config.json that "
      "of another size of the model?");
  config["num_hidden_layers"] = 9;
  refuse("missing: 67 more");
  options.format = ExportFormat::Safetensors;
  refuse("--strip none writes the tensors as they are.");
}

TEST_CASE_FIXTURE(Shards, "names that are all others get advice of their own") {
  add("decoder.w", {2});
  refuse("No name is one of the model: change names with --rename");
  entries.clear();
  add_all("base_model.model.");
  const DcpEntry weight = entries["base_model.model.model.layers.0.self_attn.q_proj.weight"];
  entries.erase(weight.name);
  add("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", {4, 4});
  add("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", {2, 4});
  refuse("holds LoRA adapters of PEFT without adapter_config.json; give it with --config FILE");
  options.format = ExportFormat::Bin;
  refuse("These are weights with LoRA adapters: write the adapters with --format hf");
  options.format = ExportFormat::HF;
  entries.clear();
  add_all("net.");
  options.names.strip_wrappers = false;
  refuse("Names were compared as --strip left them; without it, the prefix is found.");
}

TEST_CASE_FIXTURE(Shards, "of several models, the user chooses one") {
  add_all("net.");
  const auto net = entries;
  add_all("ema._orig_mod.module.");
  add("loss.w", {2});
  refuse("holds 2 models with names of " + (source / "config.json").string() +
         "; choose one by --select 'ema._orig_mod.module.*' or --select 'net.*'");
  options.names.select = {"ema*"};
  CHECK(names() == disk_names(names_of(config)));
  CHECK(plan().tensors[0].source_name.starts_with("ema._orig_mod.module."));
  options.names.select = {"net.*"};
  CHECK(plan().tensors[0].source_name.starts_with("net."));
  CHECK_THROWS_HOLDING(InvalidArgument, "holds several models, in 'ema.module.' and 'net.';",
                       open_model(source));
  // One without a prefix.
  options.names.select = {};
  entries.clear();
  add_all("");
  add_all("ema.");
  refuse("choose one by --exclude 'ema.*'");
  options.names.exclude = {"ema.*"};
  CHECK(names() == disk_names(names_of(config)));
}

TEST_CASE_FIXTURE(Shards, "a tied head is safe in both directions") {
  add_all("net.");
  entries.erase("net.lm_head.weight");
  refuse(
      "missing: lm_head.weight [5, 4]\n  The configuration has a head of its own: if it is tied "
      "to the embedding, set \"tie_word_embeddings\" to true.");
  config["tie_word_embeddings"] = true;
  CHECK(names() == disk_names(names_of(config)));
  entries["net.lm_head.weight"] = entries["net.model.embed_tokens.weight"];
  entries["net.lm_head.weight"].name = "net.lm_head.weight";
  CHECK(names() == disk_names(names_of(config)));
  CHECK(plan().skipped[0].why == "equal to net.model.embed_tokens.weight, to which it is tied");
  entries["net.lm_head.weight"].bytes.back() ^= 1;
  refuse(
      "unexpected: lm_head.weight [5, 4]\n  lm_head.weight differs from the embedding to which "
      "the configuration ties it: correct \"tie_word_embeddings\"");
  options.names.exclude = {"*lm_head*"};
  CHECK(names() == disk_names(names_of(config)));
}

TEST_CASE_FIXTURE(Shards, "torchtitan's names are refused for a known model too") {
  add("tok_embeddings.weight", {5, 4});
  add("layers.0.attention.wq.weight", {4, 4});
  CHECK_THROWS_HOLDING(Unsupported, "in torchtitan's names and row order", plan());
}

TEST_CASE_FIXTURE(Shards, "a whole copy is not taken for a model that lacks some weights") {
  add_all("ema.");
  add_all("net.");
  entries.erase("net.lm_head.weight");
  refuse("choose one by --select 'ema.*' or --select 'net.model.*'");
  entries.clear();
  add_all("ema.");
  add_all("");
  entries.erase("lm_head.weight");
  refuse("choose one by --select 'ema.*' or --exclude 'ema.*'");
  // A weight behind a prefix without a dot.
  entries.clear();
  add_all("net_");
  refuse("net_lm_head.weight is outside of it: is it the missing one?");
}

TEST_CASE_FIXTURE(Shards, "moments are those of the weights that are exported, or none") {
  add_all("actor.");
  add_all("critic.");
  for (const auto& [name, entry] : std::map(entries)) {
    if (name != "critic.model.norm.weight")
      add("optimizer.state." + name + ".exp_avg", Shape(entry.shape), 7);
  }
  options.format = ExportFormat::Safetensors;
  for (const ExportWhat what : {ExportWhat::All, ExportWhat::Optimizer}) {
    for (const bool knows_model : {true, false}) {
      CAPTURE(knows_model);
      options.what = what;
      options.names.select = {"critic.*"};
      if (!knows_model) config["model_type"] = "own";
      int moments = 0;
      for (const auto& tensor : plan().tensors) {
        if (!tensor.name.starts_with("exp_avg/")) continue;
        ++moments;
        CHECK(tensor.source_name.starts_with("optimizer.state.critic."));
        CHECK(tensor.name.ends_with("norm.weight") ==
              tensor.source_name.ends_with("norm.weight.exp_avg"));
      }
      CHECK(moments == 11);
    }
    config["model_type"] = "llama";
    options.names.select = {};
    refuse("holds 2 models");
  }
  // Numbered state has no names.
  entries.clear();
  add_all("");
  add("optimizer.state.0.exp_avg", {5, 4});
  options.what = ExportWhat::All;
  refuse("holds no optimizer state under names of weights");
}

TEST_CASE_FIXTURE(Shards, "moments follow their weights through --strip and --rename") {
  add_all("module.model.");
  for (const auto& [name, entry] : std::map(entries))
    add("optimizer.state." + name + ".exp_avg", Shape(entry.shape));
  options.format = ExportFormat::Safetensors;
  options.what = ExportWhat::All;
  options.names.prefixes = {"module."};
  options.names.renames = {"s/^model/own/"};
  const Names found = names();
  CHECK(found.size() == 24);
  for (const std::string& name : found)
    if (!name.starts_with("exp_avg/")) CHECK(found.contains("exp_avg/" + name));
}

TEST_CASE_FIXTURE(Shards, "optimizer state has the names of weights, of a GPT-2 too") {
  config = {{"model_type", "gpt2"}, {"vocab_size", 5}, {"n_positions", 4},
            {"n_embd", 4},          {"n_layer", 1},    {"n_head", 1}};
  add_all("net.");
  add("optimizer.state.transformer.wte.weight.exp_avg", {5, 4});
  add("optimizer.state.transformer.ln_f.bias.step", {});
  add("optimizer.state.loss.weight.exp_avg", {2});
  options.format = ExportFormat::Safetensors;
  options.what = ExportWhat::All;
  const Names all = names();
  for (const char* name :
       {"transformer.wte.weight", "exp_avg/transformer.wte.weight", "step/transformer.ln_f.bias"}) {
    CAPTURE(name);
    CHECK(all.contains(name));
  }
  CHECK(all.size() == disk_names(names_of(config)).size() + 2);
  options.what = ExportWhat::Optimizer;
  CHECK(names() == Names{"exp_avg/transformer.wte.weight", "step/transformer.ln_f.bias"});
}

const fs::path kExperts = test::source_path("tests/io/dcp/fixtures/experts");

std::vector<float> values(const SafetensorsReader& file, const std::string& name) {
  REQUIRE(file.find(name) != nullptr);
  const std::int64_t n = numel(file.find(name)->shape);
  std::vector<float> out(static_cast<std::size_t>(n));
  file.read(name, 0, n, out.data(), DType::F32);
  return out;
}

/// Rows [begin, end) of item `expert` of a tensor of 4 items.
std::vector<float> part(const std::vector<float>& whole, std::size_t expert, std::size_t columns,
                        std::size_t begin, std::size_t end) {
  const std::size_t item = whole.size() / 4;
  const auto at = whole.begin() + static_cast<std::ptrdiff_t>(expert * item);
  return {at + static_cast<std::ptrdiff_t>(begin * columns),
          at + static_cast<std::ptrdiff_t>(end * columns)};
}

TEST_CASE("stacked experts of FSDP shards are written one by one, and so are their moments") {
  const TempDir dir;
  consolidate(kExperts, dir.path() / "out");
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  options.what = ExportWhat::Optimizer;
  consolidate(kExperts, dir.path() / "state", options);
  const SafetensorsReader expected(kExperts / "expected.safetensors.golden");
  const SafetensorsReader made(dir.path() / "out/model.safetensors");
  const SafetensorsReader state(dir.path() / "state/optimizer.safetensors");
  CHECK(disk_names(names_of(Json::parse(read_text(kExperts / "config.json")))).size() ==
        made.header().tensors.size());
  const std::string layer = "net.model.layers.0.mlp.", ours = "model.layers.0.block_sparse_moe.";
  const std::vector<float> up = values(expected, layer + "experts.gate_up_proj");
  const std::vector<float> down = values(expected, layer + "experts.down_proj");
  const std::vector<float> moments =
      values(expected, "optimizer.state." + layer + "experts.gate_up_proj.exp_avg");
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    const std::string expert = fmt::format("{}experts.{}.", ours, i);
    CHECK(values(made, expert + "w1.weight") == part(up, i, 4, 0, 3));
    CHECK(values(made, expert + "w3.weight") == part(up, i, 4, 3, 6));
    CHECK(values(made, expert + "w2.weight") == part(down, i, 3, 0, 4));
    CHECK(values(state, "exp_avg/" + expert + "w1.weight") == part(moments, i, 4, 0, 3));
    CHECK(values(state, "exp_avg/" + expert + "w3.weight") == part(moments, i, 4, 3, 6));
  }
  CHECK(values(made, ours + "gate.weight") == values(expected, layer + "gate.weight"));
  CHECK(state.find("step/model.layers.0.mlp.experts.gate_up_proj") != nullptr);
  CHECK(state.find("exp_avg/lm_head.weight") != nullptr);
  CHECK(state.header().tensors.size() == 11);
  // Tessera reads the export and the shards alike.
  const auto a = open_model(dir.path() / "out"), b = open_model(kExperts);
  CHECK(a->tensors().size() == b->tensors().size());
  for (const TensorInfo& info : a->tensors()) {
    std::vector<float> x(static_cast<std::size_t>(numel(info.shape))), y(x.size());
    a->read(info.name, 0, numel(info.shape), x.data(), DType::F32);
    b->read(info.name, 0, numel(info.shape), y.data(), DType::F32);
    CHECK(x == y);
  }
}

TEST_CASE("damage anywhere in stacked experts is found") {
  const std::string bytes = read_text(kExperts / "__1_0.distcp");
  // The values of experts 2 and 3, as rank 1 stores them.
  const SafetensorsReader expected(kExperts / "expected.safetensors.golden");
  const std::vector<float> up = values(expected, "net.model.layers.0.mlp.experts.gate_up_proj");
  const std::string half(reinterpret_cast<const char*>(up.data() + up.size() / 2), up.size() * 2);
  const std::size_t at = bytes.find(half);
  REQUIRE(at != std::string::npos);
  for (const std::size_t byte : {std::size_t{0}, half.size() / 2, half.size() - 1}) {
    const TempDir dir;
    fs::copy(kExperts, dir.path() / "source");
    flip_bit(dir.path() / "source/__1_0.distcp", static_cast<std::int64_t>(at + byte));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "experts.gate_up_proj[",
                         consolidate(dir.path() / "source", dir.path() / "out"));
  }
}

TEST_CASE_FIXTURE(Shards, "experts may be sharded along any dim") {
  config = Json::parse(read_text(kExperts / "config.json"));
  add_all("", true);
  const DcpEntry whole = entries["model.layers.0.mlp.experts.gate_up_proj"];  // [4, 6, 4]
  entries.erase(whole.name);
  write();
  std::vector<float> all(96);
  std::copy_n(whole.bytes.data(), whole.bytes.size(), reinterpret_cast<char*>(all.data()));
  // Shards 2 and 3 have rows 0 to 3 and 4 to 5 of all experts, in two halves of the columns.
  for (const auto& [number, begin, end] : {std::tuple{2, 0, 4}, std::tuple{3, 4, 6}}) {
    std::vector<float> box;
    for (int expert = 0; expert < 4; ++expert)
      for (int row = begin; row < end; ++row)
        for (int column = 0; column < 4; ++column)
          box.push_back(all[static_cast<std::size_t>((expert * 6 + row) * 4 + column)]);
    write_dcp_shard(source / fmt::format("shard-0000{}-model-00001-of-00001.safetensors", number),
                    {{whole.name,
                      "F32",
                      {4, end - begin, 4},
                      std::string(reinterpret_cast<const char*>(box.data()), box.size() * 4),
                      {0, begin, 0}}});
  }
  options.shards = 3;
  consolidate(source, out, options);
  const SafetensorsReader made(out / "model.safetensors");
  for (std::size_t i = 0; i < 4; ++i) {
    const std::string expert = fmt::format("model.layers.0.block_sparse_moe.experts.{}.", i);
    CHECK(values(made, expert + "w1.weight") == part(all, i, 4, 0, 3));
    CHECK(values(made, expert + "w3.weight") == part(all, i, 4, 3, 6));
  }
}

}  // namespace
}  // namespace tessera::io
