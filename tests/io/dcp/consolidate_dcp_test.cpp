#include <doctest/doctest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "io/dcp/metadata.h"
#include "io/hf/model_source.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const fs::path kFixtures = test::source_path("tests/io/dcp/fixtures");

ConsolidateOptions as_safetensors() {
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  return options;
}

std::map<std::string, std::string> expected_of(const char* fixture) {
  return tensors_of(kFixtures / fixture / "expected.safetensors.golden");
}

TEST_CASE("any model's shards become safetensors, with wrapper prefixes removed from names") {
  struct Row {
    const char* fixture;
    std::string prefix;  // of weight names
    std::size_t weights, objects;
  };
  const Row rows[] = {{"fsdp-gpt2", "model.", 17, 0}, {"fsdp-wrapped", "model._orig_mod.", 4, 2},
                      {"torchtitan", "", 4, 3},       {"mixed", "model.", 16, 2},
                      {"dcp-safetensors", "", 15, 0}, {"lightning", "model.", 4, 0}};
  for (const Row& row : rows) {
    CAPTURE(row.fixture);
    const TempDir dir;
    const fs::path source = dir.path() / "source", out = dir.path() / "out";
    fs::copy(kFixtures / row.fixture, source);
    fs::remove(source / "config.json");
    ConsolidateOptions options = as_safetensors();
    options.jobs = 3;
    const ConsolidateReport report = consolidate(source, out, options);
    const auto found = tensors_of(out / "model.safetensors");
    CHECK(found.size() == row.weights);
    std::size_t objects = 0, state = 0;
    for (const SkippedEntry& entry : report.skipped) {
      if (entry.why == "not a tensor") ++objects;
      if (entry.why.starts_with("optimizer state")) ++state;
    }
    CHECK(objects == row.objects);
    const auto expected = expected_of(row.fixture);
    CHECK(expected.size() == found.size() + state);
    for (const auto& tensor : found) {
      const auto& name = tensor.first;
      const auto& content = tensor.second;
      CAPTURE(name);
      std::string stored = row.prefix + name;
      const std::string wrapped = "model._orig_mod.layers.0._checkpoint_wrapped_module.";
      if (stored.starts_with("model._orig_mod.layers.0.")) {
        stored = wrapped + stored.substr(std::string("model._orig_mod.layers.0.").size());
      }
      REQUIRE(expected.contains(stored));
      CHECK(expected.at(stored) == content);
    }
    CHECK(Json::parse(read_text(out / "tessera.json")) == Json{{"model", nullptr}});
  }
}

TEST_CASE("GPT-2 shards become a Hugging Face model") {
  const TempDir dir;
  const fs::path out = dir.path() / "out";
  const ConsolidateReport report = consolidate(kFixtures / "fsdp-gpt2", out);
  CHECK(report.kind == "PyTorch DCP");
  CHECK(report.files == std::vector<std::string>{"model.safetensors", "config.json"});
  const auto expected = expected_of("fsdp-gpt2");
  const auto found = tensors_of(out / "model.safetensors");
  CHECK(found.size() == expected.size() - 1);  // without the tied head
  for (const auto& [name, content] : found) CHECK(expected.at("model." + name) == content);
  CHECK(open_model(out)->config() == open_model(kFixtures / "fsdp-gpt2")->config());
  REQUIRE(report.skipped.size() == 1);
  CHECK(report.skipped[0].name == "model.lm_head.weight");
  CHECK(report.skipped[0].why == "equal to model.transformer.wte.weight, to which it is tied");
}

TEST_CASE("a configuration can be named, and is required for a Hugging Face model") {
  const TempDir dir;
  const fs::path source = dir.path() / "source", out = dir.path() / "out";
  fs::copy(kFixtures / "fsdp-gpt2", source);
  fs::rename(source / "config.json", dir.path() / "elsewhere.json");
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "is a PyTorch DCP without config.json, so its model is unknown; "
                       "give a config.json with --config, or write its tensors unchanged with "
                       "--format safetensors",
                       consolidate(source, out));
  ConsolidateOptions options;
  options.config_file = dir.path() / "elsewhere.json";
  consolidate(source, out, options);
  CHECK(open_model(out)->tensors().size() == 16);
  options.config_file = dir.path() / "absent.json";
  CHECK_THROWS_HOLDING(IoError, "absent.json", consolidate(source, dir.path() / "out2", options));
  options.config_file = test::source_path("tests/golden/gpt2-tiny/config.json");
  CHECK_THROWS_HOLDING(InvalidArgument, "are not those of ",
                       consolidate(source, dir.path() / "out2", options));
  CHECK_FALSE(fs::exists(dir.path() / "out2"));
}

TEST_CASE("optimizer state is written on request") {
  for (const char* fixture : {"fsdp-wrapped", "lightning", "torchtitan"}) {
    CAPTURE(fixture);
    const TempDir dir;
    ConsolidateOptions options = as_safetensors();
    options.what = ExportWhat::All;
    consolidate(kFixtures / fixture, dir.path() / "out", options);
    const auto state = tensors_of(dir.path() / "out/optimizer.safetensors");
    const bool has_step = std::string(fixture) != "torchtitan";
    CHECK(state.size() == (has_step ? 12 : 8));
    const std::string first =
        std::string(fixture) == "lightning" ? "model.layers.0.weight" : "layers.0.weight";
    CHECK(state.contains("exp_avg_sq/" + first));
    CHECK(state.contains("step/" + first) == has_step);
    std::multiset<std::string> values, expected;
    for (const auto& [name, content] : state) values.insert(content);
    for (const auto& [name, content] : expected_of(fixture)) {
      if (name.starts_with("optim")) expected.insert(content);
    }
    CHECK(values == expected);

    options.what = ExportWhat::Optimizer;
    const auto report = consolidate(kFixtures / fixture, dir.path() / "state", options);
    CHECK(report.files == std::vector<std::string>{"optimizer.safetensors", "tessera.json"});
    CHECK(tensors_of(dir.path() / "state/optimizer.safetensors") == state);
  }
  const TempDir dir;
  ConsolidateOptions options = as_safetensors();
  options.what = ExportWhat::All;
  CHECK_THROWS_HOLDING(InvalidArgument, "is a PyTorch DCP and holds no optimizer state",
                       consolidate(kFixtures / "mixed", dir.path() / "out", options));
}

TEST_CASE("conversion changes floating-point weights only") {
  const TempDir dir;
  ConsolidateOptions options = as_safetensors();
  options.dtype = DType::F32;
  consolidate(kFixtures / "mixed", dir.path() / "out", options);
  const SafetensorsReader file(dir.path() / "out/model.safetensors");
  const auto dtype = [&](const char* name) { return file.find(name)->stored_dtype; };
  for (const char* name : {"f64", "f16", "bf16", "uneven"}) CHECK(dtype(name) == "F32");
  CHECK(dtype("i64") == "I64");
  CHECK(dtype("i8") == "I8");
  CHECK(dtype("bool") == "BOOL");
  float values[12];
  file.read("bf16", 0, 12, values, DType::F32);
  CHECK(values[11] == 2.75F);
  file.read("f64", 0, 6, values, DType::F32);
  CHECK(values[5] == static_cast<float>(1.25 / 3));
}

TEST_CASE("a plan lists what would be written, and writes nothing") {
  ConsolidateOptions options = as_safetensors();
  options.max_shard_size = 100;
  options.dtype = DType::BF16;
  const ConsolidatePlan plan = plan_consolidation(kFixtures / "fsdp-wrapped", options);
  CHECK(plan.kind == "PyTorch DCP");
  REQUIRE(plan.tensors.size() == 4);
  const auto first = std::find_if(plan.tensors.begin(), plan.tensors.end(), [](const auto& tensor) {
    return tensor.name == "layers.0.weight";
  });
  REQUIRE(first != plan.tensors.end());
  CHECK(first->source_name == "model._orig_mod.layers.0._checkpoint_wrapped_module.weight");
  CHECK(first->shape == Shape{5, 3});
  CHECK(first->stored == DType::F32);
  CHECK(first->written == DType::BF16);
  CHECK(first->bytes == 30);
  CHECK(first->file == "model.safetensors");
  CHECK(plan.files.size() == 1);
  options.max_shard_size = 30;
  CHECK(plan_consolidation(kFixtures / "fsdp-wrapped", options).files.size() == 4);
  CHECK(plan.skipped.size() == 14);
}

TEST_CASE("name prefixes are removed as the user specifies") {
  ConsolidateOptions options = as_safetensors();
  const auto names = [&](const char* fixture) {
    std::set<std::string> result;
    for (const auto& tensor : plan_consolidation(kFixtures / fixture, options).tensors) {
      result.insert(tensor.name);
    }
    return result;
  };
  options.names.strip_wrappers = false;
  CHECK(names("lightning").contains("model.model.layers.0.bias"));
  options.names.prefixes = {"model."};
  CHECK(names("lightning").contains("model.layers.0.bias"));
  options.names.prefixes = {"module.", "model."};
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "--strip module. changes no name; the first are model.model.layers.0.bias",
                       plan_consolidation(kFixtures / "lightning", options));

  const TempDir dir;
  fs::copy(kFixtures / "fsdp-wrapped", dir.path() / "source");
  std::string metadata = read_text(dir.path() / "source/.metadata");
  const std::string from = "model._orig_mod.layers.1.bias", to = "model._orig_mod.layers.0.bias";
  for (std::size_t at; (at = metadata.find(from)) != std::string::npos;) {
    metadata.replace(at, from.size(), to);
  }
  write_text(dir.path() / "source/.metadata", metadata);
  options.names = {};
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "source: model._orig_mod.layers.0._checkpoint_wrapped_module.bias and "
                       "model._orig_mod.layers.0.bias would both get the name layers.0.bias",
                       plan_consolidation(dir.path() / "source", options));
  options.names.strip_wrappers = false;
  CHECK(plan_consolidation(dir.path() / "source", options).tensors.size() == 4);
}

TEST_CASE("tensors that are not row-major are reordered") {
  for (const bool narrow : {false, true}) {
    const TempDir dir;
    ConsolidateOptions options = as_safetensors();
    if (narrow) options.dtype = DType::BF16;
    consolidate(kFixtures / "strided", dir.path() / "out", options);
    if (!narrow) {
      CHECK(tensors_of(dir.path() / "out/model.safetensors") == expected_of("strided"));
      continue;
    }
    const SafetensorsReader expected(kFixtures / "strided/expected.safetensors.golden");
    const SafetensorsReader made(dir.path() / "out/model.safetensors");
    for (const char* name : {"permuted", "transposed"}) {
      const auto n = numel(made.find(name)->shape);
      std::vector<float> a(24), b(24);
      expected.read(name, 0, n, a.data(), DType::F32);
      made.read(name, 0, n, b.data(), DType::F32);
      CHECK(a == b);
    }
  }
}

TEST_CASE("elements of unsupported dtypes are copied unchanged, also with --dtype") {
  for (const std::optional<DType> dtype : {std::optional<DType>{}, std::optional{DType::BF16}}) {
    const TempDir dir;
    ConsolidateOptions options = as_safetensors();
    options.dtype = dtype;
    const ConsolidatePlan plan = plan_consolidation(kFixtures / "other-dtypes", options);
    REQUIRE(plan.tensors.size() == 4);
    CHECK(plan.tensors[0].name == "c64");
    CHECK(plan.tensors[0].opaque_dtype == "C64");
    CHECK(plan.tensors[0].bytes == 16);
    // From archives, then again from the resulting Hugging Face directory.
    consolidate(kFixtures / "other-dtypes", dir.path() / "out", options);
    consolidate(dir.path() / "out", dir.path() / "again", options);
    for (const char* out : {"out", "again"}) {
      auto found = tensors_of(dir.path() / out / "model.safetensors");
      auto expected = expected_of("other-dtypes");
      CHECK(found.size() == 4);
      CHECK(found["weight"].starts_with(dtype ? "BF16 [3]" : "F32 [3]"));
      found.erase("weight");
      expected.erase("weight");
      CHECK(found == expected);
    }
  }
}

// DCP safetensors shards of a GPT-2, with an extra tensor of an unsupported dtype.
void write_gpt2_and(const fs::path& dir, const std::string& name) {
  const fs::path made = dir / "made";
  consolidate(kFixtures / "fsdp-gpt2", made);
  const SafetensorsReader file(made / "model.safetensors");
  std::vector<DcpEntry> entries;
  for (const SafetensorsEntry& entry : file.header().tensors) {
    std::string bytes(static_cast<std::size_t>(entry.end - entry.begin), '?');
    file.file().read(entry.begin, bytes.data(), bytes.size());
    entries.push_back(
        {entry.name, entry.stored_dtype, {entry.shape.begin(), entry.shape.end()}, bytes});
  }
  entries.push_back({name, "U32", {1}, "rng!"});
  const fs::path source = dir / "source";
  fs::create_directory(source);
  write_dcp_shard(source / "shard-00001-model-00001-of-00001.safetensors", entries);
  fs::copy(made / "config.json", source / "config.json");
}

TEST_CASE("state of an unsupported dtype is copied along with a GPT-2") {
  const TempDir dir;
  write_gpt2_and(dir.path(), "optimizer.state.wte.weight.count");
  ConsolidateOptions options = as_safetensors();
  options.what = ExportWhat::Optimizer;
  consolidate(dir.path() / "source", dir.path() / "out", options);
  CHECK(tensors_of(dir.path() / "out/optimizer.safetensors") ==
        std::map<std::string, std::string>{{"count/transformer.wte.weight", "U32 [1] rng!"}});
}

TEST_CASE("a name that collides with that of an unsupported-dtype tensor is refused") {
  const TempDir dir;
  write_gpt2_and(dir.path(), "transformer._orig_mod.wte.weight");
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "transformer.wte.weight and transformer._orig_mod.wte.weight would both "
                       "get the name",
                       plan_consolidation(dir.path() / "source", as_safetensors()));
}

TEST_CASE("a GPT-2 is exported even if unrequested state cannot be read") {
  for (const char* name : {"optimizer.state.wte.weight.count", "transformer.h.0.attn.bias"}) {
    CAPTURE(name);
    const TempDir dir;
    write_gpt2_and(dir.path(), name);
    const ConsolidateReport report = consolidate(dir.path() / "source", dir.path() / "out");
    REQUIRE(report.skipped.size() == 1);
    CHECK(report.skipped[0].name == name);
    CHECK(report.skipped[0].why ==
          (name[0] == 'o' ? "optimizer state, written with --what all (U32)" : "a buffer (U32)"));
    // The configuration implies all shapes: a missing shard would be detected.
    CHECK(plan_consolidation(dir.path() / "source").warnings.empty());
    CHECK(open_model(dir.path() / "source")->tensors().size() == 16);
  }
  const TempDir dir;
  write_gpt2_and(dir.path(), "transformer.h.0.mlp.scale");
  CHECK_THROWS_HOLDING(InvalidArgument, "unexpected: transformer.h.0.mlp.scale [1]",
                       consolidate(dir.path() / "source", dir.path() / "out"));
  ConsolidateOptions options;
  options.names.exclude = {"*.scale"};
  consolidate(dir.path() / "source", dir.path() / "out", options);
}

TEST_CASE("damaged shards are refused") {
  const TempDir dir;
  const fs::path source = dir.path() / "source";
  fs::copy(kFixtures / "torchtitan", source);
  const DcpMetadata metadata =
      parse_dcp_metadata(read_text(source / ".metadata"), (source / ".metadata").string());
  const StoredBlock& chunk = metadata.tensors.at("layers.1.weight").chunks[0];
  const fs::path file = source / metadata.files[chunk.file];
  // The chunk's data lie in the middle of its archive, after the padding.
  const std::string bytes = read_text(file);
  const std::size_t at = bytes.find("archive/data/0", static_cast<std::size_t>(chunk.offset));
  REQUIRE(at != std::string::npos);
  const std::size_t data = bytes.find_first_not_of("FBZ", bytes.find("FB", at) + 4);
  flip_bit(file, static_cast<std::int64_t>(data));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "layers.1.weight",
                       consolidate(source, dir.path() / "out", as_safetensors()));
  // A plan reads descriptions only, no data.
  CHECK(plan_consolidation(source, dir.path() / "out", as_safetensors()).tensors.size() == 4);
  flip_bit(file, static_cast<std::int64_t>(at));
  for (const auto& export_it : std::vector<std::function<void()>>{
           [&] { plan_consolidation(source, dir.path() / "out", as_safetensors()); },
           [&] { consolidate(source, dir.path() / "out", as_safetensors()); }}) {
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "the local header at", (export_it(), 0));
  }
  CHECK_FALSE(fs::exists(dir.path() / "out"));
}

TEST_CASE("a Hugging Face model whose tensors cannot be checked keeps its own names") {
  const TempDir dir;
  const fs::path source = dir.path() / "source", out = dir.path() / "out";
  ConsolidateOptions options = as_safetensors();
  consolidate(kFixtures / "lightning", dir.path() / "made", options);
  fs::create_directory(source);
  fs::copy(dir.path() / "made/model.safetensors", source / "model.safetensors");
  options.overwrite = true;
  for (const char* config :
       {"{}", "[]", R"({"model_type": 5})", R"({"model_type": "gpt2", "tie_word_embeddings": false,
         "n_embd": 4, "n_head": 1})",
        R"({"model_type": "llama"})"}) {
    CAPTURE(config);
    write_text(source / "config.json", config);
    const ConsolidateReport report = consolidate(source, out, options);
    CHECK(report.kind == "Hugging Face model");
    REQUIRE(report.skipped.size() == 1);
    CHECK(report.skipped[0].name == "config.json");
    CHECK(report.skipped[0].why.ends_with("tensors are written unchanged"));
    CHECK(tensors_of(out / "model.safetensors") == tensors_of(source / "model.safetensors"));
  }
  // Names of a GPT-2 that tessera does not compute are not checked.
  write_text(source / "config.json",
             R"({"model_type": "gpt2", "tie_word_embeddings": false, "n_embd": 4, "n_head": 1})");
  const ConsolidatePlan plan = plan_consolidation(source);
  REQUIRE(plan.warnings.size() == 1);
  CHECK(holds(plan.warnings[0], "\"tie_word_embeddings\" is false"));
  CHECK(holds(plan.warnings[0], "so names, shapes and number of the tensors are not checked"));
}

}  // namespace
}  // namespace tessera::io
