// DCP shards of a model unknown to tessera, exported as a Hugging Face directory.

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "io/hf/config.h"
#include "io/safetensors/writer.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const fs::path kFixtures = test::source_path("tests/io/dcp/fixtures");

struct Entry {
  std::string name;
  const char* dtype = "F32";
  std::int64_t elements = 2;
};

/// A safetensors DCP shard whose bytes count up.
void write_shards(const fs::path& dir, const std::vector<Entry>& entries) {
  const std::map<std::string, std::size_t> widths{
      {"F32", 4}, {"BF16", 2}, {"I32", 4}, {"F8_E4M3", 1}};
  std::vector<DcpEntry> written;
  std::size_t count = 0;
  for (const Entry& entry : entries) {
    const auto size = static_cast<std::size_t>(entry.elements) * widths.at(entry.dtype);
    written.push_back({entry.name, entry.dtype, {entry.elements}, ""});
    for (std::size_t i = 0; i < size; ++i) written.back().bytes += static_cast<char>(count++ % 60);
  }
  fs::create_directories(dir);
  write_dcp_shard(dir / "shard-00001-model-00001-of-00001.safetensors", written);
}

const std::vector<Entry> kTensors = {{"model.embed_tokens.weight"},
                                     {"model.layers.0.mlp.up_proj.weight", "F32", 6},
                                     {"model._orig_mod.norm.weight"},
                                     {"_orig_mod.lm_head.weight"}};

/// Shards of a model that tessera does not know, with their config.json.
struct OtherModel {
  TempDir dir;
  fs::path source = dir.path() / "source", out = dir.path() / "out";
  ConsolidateOptions options;
  std::vector<std::string> warnings;
  Json config = {{"architectures", {"ArcticForCausalLM"}},
                 {"model_type", "arctic"},
                 {"hidden_size", 32},
                 {"rms_norm_eps", 1e-6},
                 {"rope_scaling", nullptr},
                 {"tie_word_embeddings", true},
                 {"torch_dtype", "float16"}};

  OtherModel() {
    options.shards = 1;
    options.warn = [this](const std::string& text) { warnings.push_back(text); };
    write_shards(source, kTensors);
    write_config();
  }
  void write_config() const { write_text(source / "config.json", config.dump()); }
  Json written(const char* name = "config.json") const {
    return Json::parse(read_text(out / name));
  }
  Json export_config() {
    options.overwrite = true;
    write_config();
    consolidate(source, out, options);
    return written();
  }
  std::set<std::string> names() const {
    std::set<std::string> result;
    for (const auto& tensor : plan_consolidation(source, options).tensors) {
      result.insert(tensor.name);
    }
    return result;
  }
};

TEST_CASE_FIXTURE(OtherModel, "any model's shards become a Hugging Face directory") {
  const ConsolidateReport report = consolidate(source, out, options);
  CHECK(report.kind == "PyTorch DCP as safetensors");
  CHECK(report.files == std::vector<std::string>{"model.safetensors", "config.json"});
  CHECK(report.skipped.empty());
  const SafetensorsReader made(out / "model.safetensors");
  const SafetensorsReader shard(source / "shard-00001-model-00001-of-00001.safetensors");
  for (const auto& pair : std::map<std::string, std::string>{
           {"model.embed_tokens.weight", "model.embed_tokens.weight"},
           {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"},
           {"model._orig_mod.norm.weight", "model.norm.weight"},
           {"_orig_mod.lm_head.weight", "lm_head.weight"}}) {
    const std::string &from = pair.first, &to = pair.second;
    CAPTURE(from);
    REQUIRE(made.find(to) != nullptr);
    const std::int64_t n = numel(made.find(to)->shape);
    std::vector<float> a(6), b(6);
    made.read(to, 0, n, a.data(), DType::F32);
    shard.read(from, 0, n, b.data(), DType::F32);
    CHECK(a == b);
  }
  config["torch_dtype"] = "float32";
  CHECK(written() == config);
}

TEST_CASE_FIXTURE(OtherModel, "an export without shape checks prints a warning, in a plan too") {
  const std::string said =
      (source / "config.json").string() +
      " has model_type \"arctic\", which tessera does not know, so names, shapes and number of the "
      "tensors are not checked; --dry-run shows the names, and --like DIR compares them with those "
      "of another Hugging Face directory";
  const ConsolidatePlan plan = plan_consolidation(source, out, options);
  CHECK(plan.warnings == std::vector<std::string>{said});
  CHECK_FALSE(fs::exists(out));
  consolidate(source, out, options);
  CHECK(warnings == plan.warnings);
  // A plain safetensors export promises no model and warns about nothing.
  options.format = ExportFormat::Safetensors;
  CHECK(plan_consolidation(source, options).warnings.empty());
}

TEST_CASE_FIXTURE(OtherModel, "names stay but for wrappers, unless the user says otherwise") {
  const std::set<std::string> theirs{"model.embed_tokens.weight", "model.norm.weight",
                                     "model.layers.0.mlp.up_proj.weight", "lm_head.weight"};
  CHECK(names() == theirs);
  options.format = ExportFormat::Safetensors;
  CHECK(names() == theirs);
  options.tensors = {"model.layers.*"};
  CHECK(names() == std::set<std::string>{"model.layers.0.mlp.up_proj.weight"});
  options.tensors = {};
  fs::rename(source / "config.json", dir.path() / "elsewhere.json");
  CHECK(names() == theirs);
  options.config_file = dir.path() / "elsewhere.json";
  options.format = ExportFormat::HF;
  CHECK(names() == theirs);

  options.names = {.strip_wrappers = false};
  CHECK(names().contains("model._orig_mod.norm.weight"));
  options.names.prefixes = {"model."};
  CHECK(names().contains("_orig_mod.norm.weight"));
  CHECK(names().contains("embed_tokens.weight"));
  options.names = {.renames = {"s/^model/decoder/"}, .exclude = {"*lm_head*"}};
  CHECK(names() == std::set<std::string>{"decoder.embed_tokens.weight", "decoder.norm.weight",
                                         "decoder.layers.0.mlp.up_proj.weight"});
}

TEST_CASE_FIXTURE(OtherModel, "--like compares names and shapes, and has the configuration") {
  const fs::path like = dir.path() / "like";
  consolidate(source, like, options);  // its names and shapes
  write_text(like / "config.json", Json{{"model_type", "like"}}.dump());
  options.like = like;
  write_shards(source, {{"net.model.embed_tokens.weight"},
                        {"net.model.layers.0.mlp.up_proj.weight", "F32", 6},
                        {"net.model.norm.weight"},
                        {"net.lm_head.weight"},
                        {"loss.weight"}});
  const ConsolidatePlan plan = plan_consolidation(source, options);
  CHECK(plan.warnings.empty());
  CHECK(plan.tensors.size() == 4);
  CHECK(names().contains("lm_head.weight"));
  REQUIRE(plan.skipped.size() == 1);
  CHECK(plan.skipped[0].name == "loss.weight");
  CHECK(plan.skipped[0].why == "outside of the model, which is in net.");
  consolidate(source, out, options);
  CHECK(written()["model_type"] == "like");
  options.config_file = source / "config.json";
  options.overwrite = true;
  consolidate(source, out, options);
  CHECK(written()["model_type"] == "arctic");
  options.config_file = {};
  // Float8 is floating-point, and integers are no weights.
  write_shards(source, {{"model.embed_tokens.weight", "F8_E4M3"},
                        {"model.layers.0.mlp.up_proj.weight", "F32", 6},
                        {"model.norm.weight"},
                        {"lm_head.weight"}});
  const auto tensors = plan_consolidation(source, options).tensors;
  CHECK(
      std::ranges::any_of(tensors, [](const auto& one) { return one.opaque_dtype == "F8_E4M3"; }));
  write_shards(source, {{"model.embed_tokens.weight", "I32"},
                        {"model.layers.0.mlp.up_proj.weight", "F32", 5},
                        {"x"},
                        {"model.norm.weight"}});
  const std::string refused =
      "the tensors of " + source.string() + " are not those of " + like.string() + ":\n";
  CHECK_THROWS_HOLDING(InvalidArgument,
                       refused +
                           "  missing: lm_head.weight [2]\n"
                           "  shape: model.layers.0.mlp.up_proj.weight is [5], expected [6]\n"
                           "  dtype: model.embed_tokens.weight is i32, expected f32, bf16 or f16\n"
                           "  unexpected: x [2]\n",
                       plan_consolidation(source, options));
  options.like = source;
  CHECK_THROWS_HOLDING(InvalidArgument, "is no Hugging Face model directory",
                       plan_consolidation(source, options));
}

TEST_CASE_FIXTURE(OtherModel, "optimizer state gets the names of its weights") {
  write_config();
  for (const char* fixture : {"lightning", "fsdp-wrapped"}) {
    CAPTURE(fixture);
    options = {};
    options.config_file = source / "config.json";
    const bool lightning = std::string(fixture) == "lightning";
    for (const auto& tensor : plan_consolidation(kFixtures / fixture, options).tensors) {
      CAPTURE(tensor.name);
      CHECK(tensor.name.starts_with(lightning ? "model.layers." : "layers."));
    }
    options.format = ExportFormat::Safetensors;
    options.what = ExportWhat::All;
    std::set<std::string> weights, state;
    for (const auto& tensor : plan_consolidation(kFixtures / fixture, options).tensors) {
      const std::size_t slash = tensor.name.find('/');
      if (slash == std::string::npos) weights.insert(tensor.name);
      if (tensor.name.starts_with("exp_avg/")) state.insert(tensor.name.substr(slash + 1));
    }
    CHECK(weights.size() == 4);
    CHECK(state == weights);
  }
}

TEST_CASE_FIXTURE(OtherModel,
                  "config.json's dtype becomes the one with the most bytes, if it has one") {
  CHECK(export_config()["torch_dtype"] == "float32");
  options.dtype = DType::BF16;
  config["dtype"] = nullptr;
  config["text_config"] = {{"dtype", "float16"}, {"hidden_size", 7}};
  config["vision_config"] = {{"torch_dtype", "float16"}};
  Json expected = config;
  expected["dtype"] = expected["torch_dtype"] = expected["text_config"]["dtype"] = "bfloat16";
  CHECK(export_config() == expected);
  config.erase("torch_dtype");
  expected.erase("torch_dtype");
  CHECK(export_config() == expected);
  config.erase("dtype");
  expected.erase("dtype");
  expected["torch_dtype"] = "bfloat16";
  CHECK(export_config() == expected);

  options.dtype = {};
  write_shards(source, {{"a", "F32", 2}, {"b", "BF16", 5}, {"c", "I32", 50}, {"d", "F8_E4M3", 90}});
  CHECK(export_config()["torch_dtype"] == "bfloat16");
  write_shards(source, {{"a", "F8_E4M3"}, {"b", "I32"}});
  CHECK(export_config() == config);
}

TEST_CASE_FIXTURE(OtherModel, "tensors of unsupported dtypes are copied unchanged") {
  write_shards(source, {{"model.layers.0.w", "F8_E4M3", 8}, {"model.layers.0.scale", "F32", 1}});
  options.dtype = DType::BF16;
  consolidate(source, out, options);
  const SafetensorsReader made(out / "model.safetensors");
  CHECK(made.find("model.layers.0.w")->stored_dtype == "F8_E4M3");
  CHECK(made.find("model.layers.0.scale")->stored_dtype == "BF16");
  const SafetensorsReader shard(source / "shard-00001-model-00001-of-00001.safetensors");
  std::string bytes[2] = {std::string(8, '?'), std::string(8, '!')};
  int i = 0;
  for (const SafetensorsReader* file : {&made, &shard}) {
    file->file().read(file->find("model.layers.0.w")->begin, bytes[i++].data(), 8);
  }
  CHECK(bytes[0] == bytes[1]);
  CHECK(written()["torch_dtype"] == "bfloat16");
}

TEST_CASE_FIXTURE(OtherModel, "scales of quantized weights are not converted") {
  for (const char* key : {"quantization_config", "compression_config"}) {
    CAPTURE(key);
    config[key] = {{"quant_method", "fp8"}};
    options.dtype = DType::BF16;
    write_config();
    const std::string refused = fmt::format("config.json has a \"{}\", so ", key);
    CHECK_THROWS_HOLDING(InvalidArgument, refused, plan_consolidation(source, options));
    CHECK_THROWS_HOLDING(InvalidArgument,
                         "lm_head.weight may be scales of quantized weights, which --dtype "
                         "would convert; omit --dtype",
                         plan_consolidation(source, options));
    options.dtype = {};
    CHECK(export_config()[key] == config[key]);
    options.dtype = DType::F32;  // the dtype of all scales
    CHECK(export_config()[key] == config[key]);
    config[key] = nullptr;
    options.dtype = DType::BF16;
    CHECK(export_config()["torch_dtype"] == "bfloat16");
  }
}

TEST_CASE_FIXTURE(OtherModel, "a nested quantization configuration has the same effect") {
  config["text_config"] = {{"quantization_config", {{"quant_method", "fp8"}}}};
  options.dtype = DType::BF16;
  write_config();
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "config.json has a \"text_config.quantization_config\", so ",
                       plan_consolidation(source, options));
}

TEST_CASE_FIXTURE(OtherModel, "optimizer state does not become weights") {
  for (const char* kind : {"exp_avg", "exp_avg_sq", "momentum_buffer"}) {
    CAPTURE(kind);
    const std::string state = fmt::format("state.layers.0.w.{}", kind);
    write_shards(source, {{"model.layers.0.w"}, {state}});
    options.format = ExportFormat::HF;
    CHECK_THROWS_HOLDING(InvalidArgument,
                         "tensor " + state +
                             " is optimizer state by its name, not a weight of a Hugging Face "
                             "model; leave it out with --exclude '*." +
                             kind + "'",
                         plan_consolidation(source, options));
    options.format = ExportFormat::Safetensors;
    CHECK(names() == std::set<std::string>{"model.layers.0.w", state});
  }
  options.format = ExportFormat::HF;
  write_shards(source, {{"app.model.layers.0.w"}, {"app.optim.state.layers.0.w.exp_avg"}});
  CHECK(names() == std::set<std::string>{"layers.0.w"});
}

TEST_CASE_FIXTURE(OtherModel, "torchtitan's own names are not mistaken for Hugging Face's") {
  const std::string query = "layers.11.attention.wq.weight";
  write_shards(source, {{"tok_embeddings.weight"}, {query}, {"output.weight"}});
  CHECK_THROWS_HOLDING(Unsupported,
                       "has tok_embeddings.weight and " + query +
                           ", in torchtitan's names and row order, which Hugging Face programs do "
                           "not read; convert them with torchtitan's own script",
                       plan_consolidation(source, options));
  options.format = ExportFormat::Safetensors;
  CHECK(names().contains(query));
  options.format = ExportFormat::HF;
  for (const char* other : {"layers.attention.wq.weight", "layers.1.x.attention.wq.weight",
                            "layers.1.attention.wq.bias"}) {
    CAPTURE(other);
    write_shards(source, {{"tok_embeddings.weight"}, {other}});
    CHECK(names().contains(other));
  }
  write_shards(source, {{"embed_tokens.weight"}, {query}});
  CHECK(names().contains(query));
}

TEST_CASE_FIXTURE(OtherModel, "a foreign model is not replaced") {
  options.overwrite = true;
  const fs::path theirs = dir.path() / "theirs";
  consolidate(source, theirs, options);
  const SafetensorsReader made(theirs / "model.safetensors");
  CHECK(made.header().metadata.at("format") == "pt");
  CHECK(made.header().metadata.at("writer").starts_with("tessera "));
  consolidate(source, theirs, options);

  // Without metadata, as Hugging Face's programs write it.
  std::vector<SafetensorsSpec> specs{{"a", DType::U8, {8}}};
  write_text(theirs / "model.safetensors", plan_safetensors(specs).preamble + "12345678");
  const auto refuse = [&](const std::string& text) {
    const std::string before = read_text(theirs / "model.safetensors");
    CHECK_THROWS_HOLDING(InvalidArgument, text, consolidate(source, theirs, options));
    CHECK(read_text(theirs / "model.safetensors") == before);
    CHECK_FALSE(fs::exists(dir.path() / "theirs.tmp"));
  };
  refuse(
      "contains model.safetensors, which does not name tessera as its writer: it is not replaced");
  write_text(theirs / "model.safetensors", "no safetensors");
  refuse("which does not name tessera as its writer");
}

TEST_CASE_FIXTURE(OtherModel, "the directory of --config is not replaced") {
  options.overwrite = true;
  consolidate(source, out, options);
  const auto refuse = [&](const fs::path& config_file, const fs::path& holder) {
    options.config_file = config_file;
    const std::string text = holder.string() + " contains " + config_file.string() +
                             ", the file of --config; choose another directory";
    CHECK_THROWS_HOLDING(InvalidArgument, text, plan_consolidation(source, out, options));
    CHECK_THROWS_HOLDING(InvalidArgument, text, consolidate(source, out, options));
  };
  refuse(out / "config.json", out);
  fs::create_directory_symlink(out, dir.path() / "link");
  refuse(dir.path() / "link/config.json", out);
  // In Hugging Face's cache files are links out of it; other links lead into it.
  fs::create_symlink(out / "config.json", dir.path() / "linked.json");
  refuse(dir.path() / "linked.json", out);
  fs::rename(out / "config.json", dir.path() / "blob");
  fs::create_symlink(dir.path() / "blob", out / "config.json");
  refuse(out / "config.json", out);
  const fs::path attempt = dir.path() / "out.tmp";
  fs::create_directory(attempt);
  fs::copy(dir.path() / "blob", attempt / "config.json");
  refuse(attempt / "config.json",
         attempt.string() + ", the working directory of an export to " + out.string() + ",");
  CHECK(fs::exists(attempt / "config.json"));
}

TEST_CASE_FIXTURE(OtherModel, "a config.json that says nothing about names is reported") {
  options.format = ExportFormat::Safetensors;
  for (const bool strips : {true, false}) {
    options.names.strip_wrappers = strips;
    const ConsolidatePlan plan = plan_consolidation(source, options);
    REQUIRE(plan.skipped.size() == 1);
    CHECK(plan.skipped[0].name == "config.json");
    CHECK(plan.skipped[0].why.ends_with(
        "has model_type \"arctic\", which tessera does not know: tensors are written unchanged"));
  }
}

TEST_CASE_FIXTURE(OtherModel, "files that transformers opens are copied byte for byte") {
  const std::set<std::string> names{"generation_config.json",
                                    "tokenizer.json",
                                    "tokenizer_config.json",
                                    "special_tokens_map.json",
                                    "added_tokens.json",
                                    "chat_template.jinja",
                                    "chat_template.json",
                                    "vocab.json",
                                    "merges.txt",
                                    "vocab.txt",
                                    "tokenizer.model",
                                    "spiece.model",
                                    "spm.model",
                                    "tekken.json",
                                    "tiktoken.model",
                                    "processor_config.json",
                                    "preprocessor_config.json",
                                    "video_preprocessor_config.json"};
  for (const std::string& name : names) write_text(source / name, "{ \"of\" :\n\"" + name + "\xff");
  write_text(source / "modeling_arctic.py", "");
  const ConsolidateReport report = consolidate(source, out, options);
  CHECK(report.files.size() == names.size() + 2);
  for (const std::string& name : names) CHECK(read_text(out / name) == read_text(source / name));
  CHECK_FALSE(fs::exists(out / "modeling_arctic.py"));
  CHECK_THROWS_HOLDING(InvalidArgument, "exists already", consolidate(source, out, options));
  options.overwrite = true;
  consolidate(source, out, options);  // recognized as an export and replaced
  write_text(out / "modeling_arctic.py", "");
  CHECK_THROWS_HOLDING(InvalidArgument, "modeling_arctic.py, which is not part of an export",
                       consolidate(source, out, options));
}

TEST_CASE_FIXTURE(OtherModel, "the tokenizer next to --config is used if the source has none") {
  const fs::path theirs = dir.path() / "theirs";
  fs::create_directory(theirs);
  fs::rename(source / "config.json", theirs / "config.json");
  options.config_file = theirs / "config.json";
  options.overwrite = true;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    write_text(theirs / name, "theirs");
  }
  consolidate(source, out, options);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    CHECK(read_text(out / name) == "theirs");
  }
  write_text(source / "generation_config.json", "own");
  consolidate(source, out, options);
  CHECK(read_text(out / "generation_config.json") == "own");
  CHECK(read_text(out / "tokenizer.json") == "theirs");
  // The two tokenizers must not be mixed.
  write_text(source / "tokenizer.json", "own");
  fs::remove(source / "generation_config.json");
  consolidate(source, out, options);
  CHECK(read_text(out / "tokenizer.json") == "own");
  CHECK_FALSE(fs::exists(out / "tokenizer_config.json"));
  CHECK(read_text(out / "generation_config.json") == "theirs");
}

TEST_CASE_FIXTURE(OtherModel, "Python code is not copied, but named if the model needs it") {
  config["auto_map"] = {{"AutoConfig", "configuration_x.XConfig"},
                        {"AutoModel", "modeling_x.XModel"},
                        {"AutoModelForCausalLM", "owner/name--modeling_y.Y"}};
  write_config();
  write_text(source / "tokenizer_config.json",
             R"({"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", null]}})");
  write_text(source / "processor_config.json", "no JSON");
  fs::create_directory(source / "additional_chat_templates");
  const ConsolidatePlan plan = plan_consolidation(source, options);
  REQUIRE(plan.warnings.size() == 3);
  CHECK(plan.warnings[2] ==
        "this model needs Python files, which are programs and therefore not copied: "
        "configuration_x.py, modeling_x.py, tokenization_x.py; if you trust them, copy them and "
        "their imports next to the new config.json");
  CHECK(plan.warnings[1].ends_with(
      "additional_chat_templates is not copied: exports have no subdirectories"));
  CHECK(
      auto_map_files(Json{{"auto_map", {{"A", "b\n.C"}, {"D", "\x1b[2J.E"}, {"F", "g/h-1.I"}}}}) ==
      std::set<std::string>{"g/h-1.py"});
  CHECK(auto_map_files(Json::parse(R"([{"auto_map": {"A": "b.C"}}])")).empty());
  CHECK(auto_map_files(Json::parse(R"({"auto_map": {"A": 5, "B": ".C", "D": "e", "F": [[]]}})"))
            .empty());
}

TEST_CASE_FIXTURE(OtherModel, "copied files are inspected within size limits") {
  const auto asks = [&](const std::string& before, const std::string& after) {
    write_text(source / "tokenizer_config.json",
               before + R"("auto_map": {"AutoTokenizer": "tokenization_x.X"})" + after);
    consolidate(source, out, options);
    CHECK(read_text(out / "tokenizer_config.json") == read_text(source / "tokenizer_config.json"));
    const bool said = warnings.size() == 2;
    warnings.clear();
    return said;
  };
  options.overwrite = true;
  CHECK(asks("{", "}"));
  CHECK_FALSE(asks("{", ", \"x\": " + std::string(1000, '[') + std::string(1000, ']') + "}"));
  CHECK_FALSE(asks("{", std::string(std::size_t{1} << 20, ' ') + "}"));
  CHECK_FALSE(asks("", ""));
}

TEST_CASE_FIXTURE(OtherModel,
                  "large models are split into files with an index, and exports resume") {
  options.max_shard_size = 16;
  options.memory = 128 << 10;
  const ConsolidatePlan plan = plan_consolidation(source, out, options);
  REQUIRE(plan.files.size() == 3);
  CHECK(plan.files[0].name == "model-00001-of-00003.safetensors");
  options.progress = [](const ConsolidateProgress& at) { return at.done < at.total / 2; };
  CHECK_THROWS_AS(consolidate(source, out, options), ConsolidationStopped);
  CHECK_FALSE(fs::exists(out));
  options.progress = nullptr;
  const ConsolidateReport report = consolidate(source, out, options);
  CHECK(report.reused_bytes > 0);
  const Json index = written("model.safetensors.index.json");
  CHECK(index["metadata"]["total_size"] == 48);
  CHECK(index["weight_map"] == Json{{"lm_head.weight", plan.files[0].name},
                                    {"model.embed_tokens.weight", plan.files[0].name},
                                    {"model.layers.0.mlp.up_proj.weight", plan.files[1].name},
                                    {"model.norm.weight", plan.files[2].name}});
  // A Hugging Face directory is exported again, with the same names.
  options = {};
  consolidate(out, dir.path() / "again", options);
  const SafetensorsReader again(dir.path() / "again/model.safetensors");
  CHECK(again.header().tensors.size() == 4);
  CHECK(again.find("model.layers.0.mlp.up_proj.weight") != nullptr);
  CHECK(read_text(dir.path() / "again/config.json") == read_text(out / "config.json"));
}

TEST_CASE_FIXTURE(OtherModel, "a Hugging Face directory keeps its names") {
  options.format = ExportFormat::Safetensors;
  options.names.strip_wrappers = false;
  consolidate(source, out, options);
  fs::copy(source / "config.json", out / "config.json");
  options = {};
  std::set<std::string> found;
  for (const auto& tensor : plan_consolidation(out, options).tensors) found.insert(tensor.name);
  CHECK(found.contains("model._orig_mod.norm.weight"));
  CHECK(found.contains("_orig_mod.lm_head.weight"));
}

TEST_CASE_FIXTURE(OtherModel, "Python-specific numbers in config.json are kept") {
  const std::string text =
      R"({"model_type": "x", "a": [0.0, Infinity], "b": {"c": -Infinity, "d": NaN }, "e": "NaN, \"Infinity,",)"
      R"("f": 1000000000000000019884624838656, "g": [-9223372036854775809,18446744073709551615], "h": 0.30000000000000004, "i": -123456789012345678})";
  write_text(source / "config.json", text);
  options.overwrite = true;
  consolidate(source, out, options);
  Json expected = parse_hf_config(text, "config.json");
  expected["torch_dtype"] = "float32";
  const std::string made = read_text(out / "config.json");
  CHECK(made == dump_hf_config(expected) + "\n");
  CHECK(holds(made, "    Infinity\n"));
  CHECK(holds(made, R"("c": -Infinity,)"));
  CHECK(holds(made, R"("d": NaN)"
                    "\n"));
  CHECK(made.find(R"("e": "NaN, \"Infinity,")") != std::string::npos);
  CHECK(holds(made, R"("f": 1000000000000000019884624838656,)"));
  CHECK(holds(made, "    -9223372036854775809,\n    18446744073709551615\n"));
  CHECK(holds(made, R"("h": 0.30000000000000004,)"));
  CHECK(expected["i"] == -123456789012345678);  // needs 64 bits
  CHECK(dump_hf_config({{"\xEE\x80\x80NaN", "\xEE\x80\x80x"}}) ==
        "{\n  \"\xEE\x80\x80NaN\": \"\xEE\x80\x80x\"\n}");
  for (const char* bad : {R"({"model_type": "x", "a": Infinityx})",
                          R"({"model_type": "x", NaN: 1})", R"({"model_type": "x", "a": 1NaN})",
                          R"({"model_type": "x", "a": NaN)", R"({"model_type": "x\)"}) {
    CAPTURE(bad);
    write_text(source / "config.json", bad);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "config.json is not valid JSON",
                         consolidate(source, out, options));
  }
}

TEST_CASE_FIXTURE(OtherModel, "a configuration without a model type is refused") {
  for (const char* text : {"[]", "5", "{}", R"({"model_type": 5})"}) {
    CAPTURE(text);
    write_text(source / "config.json", text);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "config.json is not an object with a \"model_type\"",
                         consolidate(source, out, options));
    options.config_file = source / "config.json";
    options.format = ExportFormat::Safetensors;
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "with --config, or write the tensors alone",
                         consolidate(source, out, options));
    options.config_file = {};
    CHECK(plan_consolidation(source, options).tensors.size() == 4);
    options.format = ExportFormat::HF;
  }
  write_text(source / "config.json", "{\"model_type\": \"arctic\"");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "config.json", consolidate(source, out, options));
  fs::remove(source / "config.json");
  CHECK_THROWS_HOLDING(InvalidArgument, "give a config.json with --config",
                       consolidate(source, out, options));
  write_config();
  options.tensors = {"*"};
  CHECK_THROWS_HOLDING(InvalidArgument, "--tensors selects some",
                       consolidate(source, out, options));
  options.tensors = {};
  options.what = ExportWhat::All;
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "optimizer state is written with --format safetensors, dcp or bin only",
                       consolidate(source, out, options));
  CHECK_FALSE(fs::exists(out));
}

}  // namespace
}  // namespace tessera::io
