#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/consolidate.h"
#include "io/dcp/metadata.h"
#include "io/hf/model_source.h"
#include "io/hf/parts_source.h"
#include "io/megatron/files.h"
#include "io/megatron/names.h"
#include "io/pickle/pickle_reader.h"
#include "io/source/open_sharded.h"
#include "io/torch/torch_archive.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const fs::path kMegatron = test::source_path("tests/io/megatron/fixtures");

/// A copy of a fixture to change.
struct MegatronCopy {
  TempDir dir;
  fs::path path;
  explicit MegatronCopy(const char* name) : path(dir.path() / name) {
    fs::copy(kMegatron / name, path, fs::copy_options::recursive);
  }
  fs::path out() const { return dir.path() / "out"; }
  void change_config(const Json& change) const {
    Json config = Json::parse(read_text(path / "config.json"));
    config.update(change);
    write_text(path / "config.json", config.dump());
  }
};

std::map<std::string, std::string> expected_of(const char* fixture) {
  return tensors_of(kMegatron / fixture / "expected.safetensors.golden");
}

TEST_CASE("Megatron's hyperparameters are of weights that decay, and of the others") {
  const MegatronCopy copy("llama");
  ConsolidateOptions options;
  options.format = ExportFormat::Bin;
  options.what = ExportWhat::Optimizer;
  std::vector<std::string> warnings;
  options.warn = [&](const std::string& text) { warnings.push_back(text); };
  consolidate(copy.path, copy.out(), options);
  for (const std::string& warning : warnings)
    CHECK(warning.find("learning rate") == std::string::npos);
  const std::string content = read_text(copy.out() / "optimizer.bin");
  const ByteRange range(content, "x");
  const TorchArchive archive(range, kMaxTorchDict);
  const PickleReader root(archive.root(), "x");
  const auto groups = root.at("param_groups").expect(PickleKind::List).items();
  REQUIRE(groups.size() == 2);
  for (std::size_t g = 0; g < 2; ++g) {
    CHECK(groups[g]->find("lr")->real == 0.01);
    CHECK(groups[g]->find("wd_mult")->real == (g == 0 ? 1.0 : 0.0));
    CHECK(groups[g]->find("step") == nullptr);  // of each weight in torch.optim
    for (const PickleValue* name : groups[g]->find("param_names")->items())
      CHECK((name->text().find("norm") != std::string_view::npos) == (g == 1));
  }
  const PickleValue& state = *root.at("state").expect(PickleKind::Dict).items()[1];
  const TorchTensor step = archive.tensor(*state.find("step"), "step");
  float value = 0;
  std::memcpy(&value, content.data() + step.begin, sizeof(value));
  CHECK(value == 2);
}

TEST_CASE("Megatron's checkpoints become Hugging Face models") {
  for (const char* fixture : {"gpt2", "llama", "old-llama", "qwen3-moe"}) {
    CAPTURE(fixture);
    const MegatronCopy copy(fixture);
    ConsolidateOptions options;
    options.jobs = 3;
    const ConsolidateReport report = consolidate(copy.path, copy.out(), options);
    CHECK(report.kind == "Megatron-core (PyTorch DCP)");
    auto expected = expected_of(fixture);
    std::erase_if(expected,
                  [](const auto& tensor) { return tensor.first.find('/') != std::string::npos; });
    CHECK(tensors_of(copy.out() / "model.safetensors") == expected);
    for (const SkippedEntry& entry : report.skipped)
      CHECK((entry.name.find("_extra_state") != std::string::npos ||
             entry.name.starts_with("optimizer.")));
  }
}

TEST_CASE("moments of Megatron's optimizer get the names and rows of their weights") {
  const MegatronCopy copy("llama");
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  options.what = ExportWhat::All;
  consolidate(copy.path, copy.out(), options);
  auto found = tensors_of(copy.out() / "model.safetensors");
  found.merge(tensors_of(copy.out() / "optimizer.safetensors"));
  CHECK(found == expected_of("llama"));
  CHECK(found.contains("exp_avg/model.layers.0.self_attn.k_proj.weight"));
}

TEST_CASE("models are opened from Megatron's checkpoints as from their exports") {
  for (const char* fixture : {"gpt2", "llama", "qwen3-moe"}) {
    CAPTURE(fixture);
    const MegatronCopy copy(fixture);
    consolidate(copy.path, copy.out());
    const auto direct = open_model(copy.path), exported = open_model(copy.out());
    REQUIRE(direct->tensors().size() == exported->tensors().size());
    for (const TensorInfo& info : exported->tensors()) {
      CAPTURE(info.name);
      const std::int64_t n = numel(info.shape);
      std::vector<float> a(static_cast<std::size_t>(n)), b(a);
      direct->read(info.name, 0, n, a.data(), DType::F32);
      exported->read(info.name, 0, n, b.data(), DType::F32);
      CHECK(a == b);
      // Elements in the middle of a part, which may be stored transposed.
      direct->read(info.name, n / 3, n / 3 + n / 2, a.data(), DType::F32);
      CHECK(std::equal(a.begin(), a.begin() + n / 2, b.begin() + n / 3));
    }
  }
}

TEST_CASE("without a configuration, Megatron's tensors keep their names") {
  const MegatronCopy copy("gpt2");
  fs::remove(copy.path / "config.json");
  CHECK_THROWS_HOLDING(InvalidArgument, "--config", consolidate(copy.path, copy.out()));
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  consolidate(copy.path, copy.out(), options);
  CHECK(tensors_of(copy.out() / "model.safetensors")
            .contains("decoder.layers.self_attention.linear_qkv.weight"));
}

TEST_CASE("the iteration of a Megatron run is chosen by its file or by --step") {
  const MegatronCopy copy("gpt2");
  const fs::path tracker = copy.path / "latest_checkpointed_iteration.txt";
  CHECK(is_megatron_run(copy.path));
  CHECK(find_megatron(copy.path) == copy.path / "iter_0000004");
  ConsolidateOptions options;
  options.step = 5;
  CHECK_THROWS_HOLDING(InvalidArgument, "has no finished iter_0000005: it has iter_0000004",
                       consolidate(copy.path, copy.out(), options));
  write_text(tracker, "5\n");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "choose one with --step",
                       consolidate(copy.path, copy.out()));
  options.step = 4;
  consolidate(copy.path, copy.out(), options);
  CHECK(tensors_of(copy.out() / "model.safetensors") == expected_of("gpt2"));
  for (const char* text : {"", "x", "-1", "1234567890123456789", "4 5"}) {
    write_text(tracker, text);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "no number of an iteration", find_megatron(copy.path));
  }
  write_text(tracker, "release");
  fs::rename(copy.path / "iter_0000004", copy.path / "release");
  CHECK(find_megatron(copy.path) == copy.path / "release");

  fs::remove(tracker);  // as NeMo has them
  fs::rename(copy.path / "release", copy.path / "weights");
  CHECK(open_sharded(copy.path)->kind() == "Megatron-core (PyTorch DCP)");
  fs::create_directories(copy.path / "mp_rank_00");
  write_text(copy.path / "mp_rank_00" / "model_optim_rng.pt", "");
  fs::remove_all(copy.path / "weights");
  CHECK_THROWS_HOLDING(Unsupported, "--ckpt-convert-format torch_dist",
                       locate_checkpoint(copy.path));
}

TEST_CASE("a configuration of another model is refused") {
  struct Row {
    const char* fixture;
    Json change;
    const char* message;
  };
  const Row rows[] = {
      {"old-llama", {{"num_hidden_layers", 1}}, "fewer layers or experts?"},
      {"old-llama", {{"num_hidden_layers", 3}}, "at position 2 of 2"},
      {"llama", {{"vocab_size", 39}}, "of shape [38, 8] does not hold"},
      {"llama", {{"intermediate_size", 5}}, "does not hold model.layers.0.mlp.gate_proj.weight"},
      {"llama", {{"num_key_value_heads", 4}}, "num_query_groups is 2"},
      {"old-llama", {{"num_key_value_heads", 1}}, "does not hold"},
      {"llama", {{"hidden_size", 16}}, "does not hold"},
      {"llama", {{"attention_bias", true}}, "self_attn.q_proj.bias"},
      {"llama", {{"tie_word_embeddings", true}}, "lm_head.weight differs"},
      {"gpt2", {{"n_positions", 32}}, "transformer.wpe.weight"},
      {"gpt2", {{"n_head", 2}}, "num_attention_heads is 4"},
      {"qwen3-moe", {{"num_experts", 2}}, "mlp.router.weight of shape [2, 4, 8] does not hold"},
      {"qwen3-moe", {{"num_experts", 8}}, "mlp.router.weight of shape [2, 4, 8] does not hold"},
      {"qwen3-moe", {{"moe_intermediate_size", 3}}, "does not hold"},
      {"qwen3-moe", {{"model_type", "unheard_of"}}, "--like"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.message);
    CAPTURE(row.change.dump());
    const MegatronCopy copy(row.fixture);
    copy.change_config(row.change);
    std::string message = "(nothing thrown)";
    try {
      consolidate(copy.path, copy.out());
    } catch (const Error& error) {
      message = error.what();
    }
    CAPTURE(message);
    CHECK(message.find(row.message) != std::string::npos);
    CHECK_FALSE(fs::exists(copy.out()));
  }
}

TEST_CASE("what Megatron's arguments do not tell is said") {
  const MegatronCopy copy("old-llama");
  std::vector<std::string> warnings;
  ConsolidateOptions options;
  options.warn = [&](const std::string& warning) { warnings.push_back(warning); };
  fs::remove(copy.path / "common.pt");
  consolidate(copy.path, copy.out(), options);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("has no arguments of Megatron-LM") != std::string::npos);
}

TEST_CASE("a run of verl is none of Megatron, although it has a tracker of the same name") {
  const TempDir dir;
  write_text(dir.path() / "latest_checkpointed_iteration.txt", "5");
  fs::create_directories(dir.path() / "global_step_5" / "actor");
  CHECK_FALSE(is_megatron_run(dir.path()));
}

TEST_CASE("weights that Hugging Face's model would compute otherwise are refused") {
  const MegatronCopy copy("old-llama");
  const fs::path common = copy.path / "common.pt";
  for (const char* argument : {"apply_layernorm_1p", "rotary_interleaved"}) {
    fs::copy_file(kMegatron / (std::string(argument) + ".pt"), common,
                  fs::copy_options::overwrite_existing);
    CHECK_THROWS_HOLDING(Unsupported, std::string(argument) + " is true",
                         consolidate(copy.path, copy.out()));
    CHECK_THROWS_HOLDING(Unsupported, std::string(argument) + " is true", open_model(copy.path));
  }
  fs::copy_file(kMegatron / "padded_vocab_size.pt", common, fs::copy_options::overwrite_existing);
  CHECK_THROWS_HOLDING(InvalidArgument, "has 80 tokens, padded to a multiple of 32",
                       consolidate(copy.path, copy.out()));
  write_text(common, "no archive");
  std::vector<std::string> warnings;
  ConsolidateOptions options;
  options.warn = [&](const std::string& warning) { warnings.push_back(warning); };
  consolidate(copy.path, copy.out(), options);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("arguments are not compared") != std::string::npos);
}

/// A source of tensors without data, by name and shape.
std::unique_ptr<ShardedSource> source_of(
    const std::vector<std::pair<std::string, Shape>>& tensors) {
  auto source = std::make_unique<ShardedSource>("dir", "PyTorch DCP");
  for (const auto& tensor : tensors) {
    StoredBlock block;
    block.box.offsets = block.box.shape = tensor.second;
    for (int i = 0; i < tensor.second.size(); ++i) block.box.offsets[i] = 0;
    source->add(tensor.first, "float32", "F32", tensor.second, {block});
  }
  source->finish({"file"}, {}, true);
  return source;
}

std::map<std::string, Shape> shapes_of(const ShardedSource& source) {
  std::map<std::string, Shape> shapes;
  for (const TensorInfo& info : source.tensors()) shapes[info.name] = info.shape;
  return shapes;
}

TEST_CASE("names of Megatron's versions and modules") {
  const Json config = {{"num_attention_heads", 2}, {"num_key_value_heads", 1}};
  const std::string block = "model.layers.0.";
  const ModelNames model{"config.json",
                         {{"model.embed_tokens.weight", {10, 4}},
                          {"model.norm.weight", {4}},
                          {block + "input_layernorm.weight", {4}},
                          {block + "self_attn.q_proj.weight", {4, 4}},
                          {block + "self_attn.k_proj.weight", {2, 4}},
                          {block + "self_attn.v_proj.weight", {2, 4}},
                          {block + "mlp.experts.1.gate_proj.weight", {3, 4}},
                          {block + "mlp.experts.1.up_proj.weight", {3, 4}}},
                         "model.",
                         false};
  std::map<std::string, Shape> expected;
  for (const ModelTensor& tensor : model.tensors) expected[tensor.name] = tensor.shape;
  std::vector<std::pair<std::string, Shape>> tensors = {
      {"module.embedding.word_embeddings.weight", {16, 4}},
      {"module.decoder.final_layernorm.weight", {4}},
      {"module.decoder.layers.0.input_layernorm.weight", {4}},
      {"module.decoder.layers.0.self_attention.linear_qkv.weight", {8, 4}},
      {"module.decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight_w", {3, 4}},
      {"module.decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight_v", {3, 4}}};
  {
    const auto source = source_of(tensors);
    REQUIRE(is_megatron(*source));
    CHECK(use_hugging_face_names(*source, model, config).empty());
    CHECK(shapes_of(*source) == expected);
  }
  tensors.push_back(
      {"chained_1.optimizer.state.exp_avg.module.decoder.final_layernorm.weight", {4}});
  {
    const auto source = source_of(tensors);
    CHECK(use_hugging_face_names(*source, model, config).empty());
    auto with_moment = expected;
    with_moment["optimizer.state.model.norm.weight.exp_avg"] = {4};
    CHECK(shapes_of(*source) == with_moment);
  }
  {
    auto flattened = tensors;
    flattened.back().second = {1, 4};
    const auto source = source_of(flattened);
    CHECK(use_hugging_face_names(*source, model, config) == "optimizer.state.exp_avg");
    CHECK(shapes_of(*source).contains(flattened.back().first));
  }
  {
    auto by_bucket = tensors;
    by_bucket.back().first = "chained_0.optimizer.distributed.dp_group_idx_0.exp_avg";
    const auto source = source_of(by_bucket);
    CHECK(use_hugging_face_names(*source, model, config) == by_bucket.back().first);
  }
  const auto source = source_of(tensors);
  CHECK_THROWS_HOLDING(InvalidArgument, "--config", use_hugging_face_names(*source, model, Json()));
  CHECK_FALSE(is_megatron(*source_of({{"decoder.final_layernorm.weight", {4}}})));
}

TEST_CASE("rows of tensors that are stored transposed") {
  const auto whole = open_sharded(test::source_path("tests/io/dcp/fixtures/strided"));
  PartsSource parts(*whole);
  int strided = 0;
  for (const TensorInfo& info : whole->tensors()) {
    if (info.shape.size() < 2 || info.shape[0] < 3) continue;
    CAPTURE(info.name);
    const auto record = whole->record(info.name);
    strided += std::ranges::any_of(
        record->chunks, [](const Chunk& chunk) { return chunk.storage && chunk.storage->strides; });
    Shape shape = info.shape;
    shape[0] = info.shape[0] - 2;
    const std::int64_t n = numel(shape), row = numel(info.shape) / info.shape[0];
    parts.add({info.name, shape, info.dtype}, {info.name, -1, 1, shape[0]});
    const std::size_t bytes = static_cast<std::size_t>(n) * dtype_size(info.dtype);
    std::string expected(bytes, 'a'), found(bytes, 'b');
    whole->read(info.name, row, row + n, expected.data(), info.dtype);
    parts.read(info.name, 0, n, found.data(), info.dtype);
    CHECK(found == expected);
  }
  CHECK(strided > 0);
}

TEST_CASE("damaged metadata of Megatron ends with an error of its own") {
  const std::string whole = read_text(kMegatron / "llama" / "iter_0000003" / ".metadata");
  int refused = 0;
  for (std::size_t i = 0; i < 400; ++i) {
    std::string text = whole;
    const std::size_t at = (i * 7919) % text.size();
    text[at] = static_cast<char>(text[at] ^ (1 << (i % 8)));
    if (i % 10 == 0) text.resize(at);
    try {
      parse_dcp_metadata(text, ".metadata");
    } catch (const CorruptCheckpoint&) {
      ++refused;
    } catch (const Unsupported&) {
      ++refused;
    }
  }
  CHECK(refused > 100);
}

}  // namespace
}  // namespace tessera::io
