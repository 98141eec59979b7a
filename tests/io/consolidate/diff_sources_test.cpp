#include "io/consolidate/diff_sources.h"

#include <doctest/doctest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/source/open_sharded.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using Kind = TensorDifference::Kind;

fs::path fixture(const std::string& name) { return test::source_path("tests/io/" + name); }

std::map<std::string, TensorDifference> by_name(const DiffReport& report) {
  std::map<std::string, TensorDifference> differences;
  for (const TensorDifference& each : report.differences) differences[each.name] = each;
  return differences;
}

/// Writes a Hugging Face directory.
fs::path exported(const fs::path& source, const fs::path& out, ConsolidateOptions options = {}) {
  options.jobs = 2;
  consolidate(source, out, options);
  return out;
}

TEST_CASE("a training checkpoint equals its export, under the names of the model") {
  const TempDir dir;
  const fs::path source = fixture("dcp/fixtures/fsdp-gpt2");
  const fs::path out = exported(source, dir.path() / "out");
  for (const int threads : {1, 3}) {
    SourceDiff same = diff_sources(source, out, {.diff = {.threads = threads}});
    CHECK(same.report.equal());
    CHECK(same.report.compared > 10);
    CHECK(same.report.bytes_read > 0);
    CHECK(same.a.kind == "PyTorch DCP");
    CHECK(same.b.kind == "Hugging Face model");
  }
  // Shards without a config.json have that of the other side.
  const fs::path bare = dir.path() / "bare";
  fs::copy(source, bare);
  fs::remove(bare / "config.json");
  CHECK(diff_sources(bare, out, {}).report.equal());
  CHECK(diff_sources(out, bare, {}).report.equal());

  flip_bit(out / "model.safetensors", -1);
  const SourceDiff other = diff_sources(source, out, {});
  REQUIRE(other.report.differences.size() == 1);
  CHECK(other.report.differences[0].kind == Kind::Values);
  CHECK(other.report.differences[0].count == 1);
  CHECK(other.report.differences[0].name.starts_with("model/transformer."));
}

TEST_CASE("rounding is recognized, and accepted on request") {
  const TempDir dir;
  const fs::path source = fixture("dcp/fixtures/fsdp-gpt2");
  ConsolidateOptions options;
  options.dtype = DType::BF16;
  const fs::path out = exported(source, dir.path() / "out", options);
  const SourceDiff rounded = diff_sources(source, out, {});
  CHECK(rounded.report.differences.size() > 10);
  for (const TensorDifference& each : rounded.report.differences) CHECK(each.is_rounding());
  CHECK(diff_sources(out, source, {}).report.differences[0].is_rounding());
  const SourceDiff accepted = diff_sources(source, out, {.diff = {.rounded = true}});
  CHECK(accepted.report.equal());
  CHECK(accepted.report.rounded == accepted.report.compared);
  // The last value of the file is another bf16.
  flip_bit(out / "model.safetensors", -2);
  const SourceDiff wrong = diff_sources(source, out, {.diff = {.rounded = true}});
  REQUIRE(wrong.report.differences.size() == 1);
  CHECK(wrong.report.differences[0].unrounded == 1);
}

TEST_CASE("tensors and shapes of one side only are differences, not errors") {
  const TempDir dir;
  const fs::path a = dir.path() / "a", b = dir.path() / "b";
  const auto write = [&](const fs::path& path, const std::vector<DcpEntry>& entries) {
    fs::create_directory(path);
    write_text(path / "config.json",
               R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 5,
                   "hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 1,
                   "num_attention_heads": 2, "max_position_embeddings": 8})");
    write_dcp_shard(path / "shard-00001-model-00001-of-00001.safetensors", entries);
  };
  const std::string four(16, 'a'), six(24, 'a');
  write(a, {{"net.model.norm.weight", "F32", {4}, four},
            {"net.value_head.weight", "F32", {4}, four},
            {"net.model.layers.0.input_layernorm.weight", "F32", {4}, four}});
  write(b, {{"model.norm.weight", "F32", {4}, four},
            {"model.layers.0.post_attention_layernorm.weight", "F32", {4}, four},
            {"model.layers.0.input_layernorm.weight", "F32", {6}, six}});
  const SourceDiff diff = diff_sources(a, b, {});
  const auto differences = by_name(diff.report);
  CHECK(differences.size() == 3);
  CHECK(diff.report.compared == 2);
  CHECK(differences.at("model/value_head.weight").kind == Kind::OnlyInA);
  CHECK(differences.at("model/model.layers.0.post_attention_layernorm.weight").kind ==
        Kind::OnlyInB);
  CHECK(differences.at("model/model.layers.0.input_layernorm.weight").kind == Kind::Shape);
  // Rules may match one side only.
  SourceDiffOptions options;
  options.names.exclude = {"net.value*"};
  options.names.renames = {"s/post_attention_layernorm/input_layernorm/"};
  options.names.exclude.push_back("model.layers.0.input*");
  CHECK(diff_sources(a, b, options).report.equal());
}

TEST_CASE("a model that tessera does not know has the names of the Hugging Face directory") {
  const TempDir dir;
  const fs::path source = fixture("dcp/fixtures/lightning");
  ConsolidateOptions options;
  write_text(dir.path() / "config.json", R"({"model_type": "arctic"})");
  options.config_file = dir.path() / "config.json";
  options.names.strip_wrappers = false;
  options.names.prefixes = {"model.model."};
  const fs::path out = exported(source, dir.path() / "out", options);
  CHECK(diff_sources(source, out, {}).report.equal());
  CHECK(diff_sources(out, source, {}).report.equal());
}

TEST_CASE("checkpoints of tessera are compared under Hugging Face's names") {
  const TempDir dir;
  const fs::path run = save(make_sample_model(), dir.path() / "run", {.world_size = 3});
  const fs::path out = exported(run, dir.path() / "out");
  SourceDiff same = diff_sources(run, out, {});
  CHECK(same.report.equal());
  CHECK(same.a.kind == "tessera checkpoint");
  CHECK(same.report.compared > 5);
  const fs::path other = save(make_sample_model(1), dir.path() / "other", {.world_size = 2});
  CHECK(diff_sources(other, out, {}).report.differences.size() > 5);
  CHECK_THROWS_HOLDING(Unsupported, "optimizer state is compared",
                       diff_sources(run, out, {.diff = {.optimizer = true}}));
  // GPT-2's matrices are transposed in GGUF.
  ConsolidateOptions options;
  options.format = ExportFormat::GGUF;
  const fs::path gguf = exported(run, dir.path() / "gguf", options) / "model.gguf";
  CHECK(diff_sources(out, gguf, {}).report.equal());
  CHECK(diff_sources(gguf, out, {}).report.equal());
}

TEST_CASE("moments of other programs are compared") {
  const fs::path source = fixture("deepspeed/fixtures/zero2");
  const SourceDiff same = diff_sources(source, fixture("deepspeed/fixtures/zero2/global_step2"),
                                       {.diff = {.optimizer = true}});
  CHECK(same.report.equal());
  CHECK(same.report.compared > 2 * diff_sources(source, source, {}).report.compared);
  const SourceDiff other = diff_sources(source, fixture("deepspeed/fixtures/zero1"),
                                        {.diff = {.model = false, .optimizer = true}});
  for (const TensorDifference& each : other.report.differences)
    CHECK(each.name.starts_with("optimizer/"));
}

TEST_CASE("damage that a checksum shows ends a comparison") {
  const TempDir dir;
  const fs::path source = dir.path() / "source", clean = fixture("dcp/fixtures/fsdp-gpt2");
  fs::copy(clean, source);
  const auto shards = open_sharded(source);
  const auto record = shards->record("model.transformer.wpe.weight");
  const Chunk& chunk = record->chunks[0];
  flip_bit(source / chunk.file, chunk.byte_begin);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "the checksum is wrong", diff_sources(source, clean, {}));
}

}  // namespace
}  // namespace tessera::io
