#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "io/base/convert.h"
#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "io/hf/gpt2_config.h"
#include "io/safetensors/writer.h"
#include "tests/io/support.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

struct Fixture {
  TempDir dir;
  fs::path source = dir.path() / "source", out = dir.path() / "out";
  Json config;

  Fixture() {
    fs::copy(test::source_path("tests/golden/gpt2-tiny"), source);
    config = Json::parse(read_text(source / "config.json"));
  }
  Json written(const char* name) const { return Json::parse(read_text(out / name)); }
  void consolidate_with_config() {
    write_text(source / "config.json", config.dump());
    consolidate(source, out);
  }
};

TEST_CASE_FIXTURE(Fixture, "a Hugging Face model keeps its configuration") {
  config["bos_token_id"] = 3;
  config["eos_token_id"] = {4, 5};
  config["resid_pdrop"] = 0.25;
  config["embd_pdrop"] = 0.5;
  config.erase("attn_pdrop");
  config["torch_dtype"] = "float32";
  consolidate_with_config();
  CHECK(written("config.json") == config);
  CHECK_FALSE(fs::exists(out / "generation_config.json"));
}

TEST_CASE_FIXTURE(Fixture, "a Hugging Face model's tokenizer is exported byte for byte") {
  const char* const names[] = {
      "tokenizer.json", "tokenizer_config.json",  "vocab.json",         "special_tokens_map.json",
      "merges.txt",     "generation_config.json", "chat_template.jinja"};
  for (const char* name : names) {
    fs::remove(source / name);
    write_text(source / name, fmt::format("{{ \"of\":\n\"{}\" }}", name));
  }
  const ConsolidateReport report = consolidate(source, out);
  CHECK(report.files.size() == 9);
  for (const char* name : names) CHECK(read_text(out / name) == read_text(source / name));
  ConsolidateOptions options;
  options.overwrite = true;
  consolidate(source, out, options);  // recognized as an export and replaced
  options.format = ExportFormat::Safetensors;
  CHECK(consolidate(source, out, options).files.size() == 2);
}

TEST_CASE_FIXTURE(Fixture, "files next to the named config.json are exported") {
  const fs::path theirs = dir.path() / "theirs";
  fs::create_directory(theirs);
  ConsolidateOptions options;
  options.config_file = theirs / "config.json";
  options.overwrite = true;
  fs::copy(source / "config.json", theirs / "config.json");
  for (const char* name : {"tokenizer.json", "vocab.json", "generation_config.json"}) {
    fs::remove(source / name);
    write_text(theirs / name, "theirs");
  }
  consolidate(source, out, options);
  for (const char* name : {"tokenizer.json", "vocab.json", "generation_config.json"}) {
    CHECK(read_text(out / name) == "theirs");
  }
  write_text(source / "vocab.json", "own");  // the two tokenizers must not be mixed
  fs::remove(theirs / "generation_config.json");
  consolidate(source, out, options);
  CHECK(read_text(out / "vocab.json") == "own");
  CHECK_FALSE(fs::exists(out / "tokenizer.json"));
  CHECK_FALSE(fs::exists(out / "generation_config.json"));
}

TEST_CASE("only GPT-2's vocabulary gets its end-of-text token") {
  Json model = Json::parse(make_sample_model().config);
  const auto id = [&](std::int64_t vocab) {
    model["vocab_size"] = vocab;
    return gpt2_config_to_hf(model, DType::F32).at("eos_token_id");
  };
  CHECK(id(50257) == 50256);
  CHECK(id(50304) == 50256);
  for (const std::int64_t vocab : {97, 50256, 50258, 65536, 100277}) CHECK(id(vocab).is_null());
}

TEST_CASE_FIXTURE(Fixture, "the exported dtype is the one with the most bytes") {
  const SampleModel model = make_sample_model();
  const auto write = [&](DType most, DType first) {
    std::vector<SafetensorsSpec> specs;
    std::map<std::string, std::string> contents;
    for (const auto& tensor : model.tensors) {
      const std::string name = "transformer." + tensor.name;
      const DType dtype = name == "transformer.h.0.attn.c_attn.bias" ? first : most;
      specs.push_back({name, dtype, tensor.shape});
      contents[name].resize(tensor.weight.size() * dtype_size(dtype));
      convert_elements(DType::F32, tensor.weight.data(), dtype, contents[name].data(),
                       numel(tensor.shape));
    }
    const SafetensorsPlan plan = plan_safetensors(specs);
    std::string bytes = plan.preamble;
    for (const SafetensorsEntry& entry : plan.tensors) bytes += contents.at(entry.name);
    fs::remove_all(source);
    fs::remove_all(out);
    fs::create_directory(source);
    write_text(source / "model.safetensors", bytes);
    config = gpt2_config_to_hf(Json::parse(model.config), DType::F32);
    consolidate_with_config();
    return written("config.json").at("torch_dtype");
  };
  CHECK(write(DType::F32, DType::BF16) == "float32");
  CHECK(write(DType::BF16, DType::F32) == "bfloat16");
  CHECK(gpt2_config_to_hf(Json::parse(model.config), DType::F64).at("torch_dtype") == "float64");
}

}  // namespace
}  // namespace tessera::io
