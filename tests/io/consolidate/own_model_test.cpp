// Checkpoints of models that tessera does not know.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

struct Fixture {
  TempDir dir;
  SampleModel model = make_sample_model();
  fs::path run = dir.path() / "run", out = dir.path() / "out";
  ConsolidateOptions options;

  explicit Fixture(const std::string& section = R"({"arch": "tiny-llama", "width": 8})") {
    model.config = section;
    for (auto& tensor : model.tensors) tensor.name = "layers." + tensor.name;
    save(model, run / "checkpoints", {.world_size = 2});
  }
  std::string named(const char* name, const std::string& text) const {
    write_text(dir.path() / name, text);
    return dir.path() / name;
  }
  void check_weights(const fs::path& file) const {
    const SafetensorsReader reader(file);
    CHECK(reader.header().tensors.size() == model.tensors.size());
    for (const auto& tensor : model.tensors) {
      std::vector<float> values(tensor.weight.size());
      reader.read(tensor.name, 0, static_cast<std::int64_t>(values.size()), values.data(),
                  DType::F32);
      CHECK(values == tensor.weight);
    }
  }
};

TEST_CASE("an own model is exported as safetensors under its own names") {
  for (const char* section : {R"({"arch": "tiny-llama", "width": 8})", R"({"arch": 3})", "{}"}) {
    Fixture f(section);
    f.options.format = ExportFormat::Safetensors;
    f.options.what = ExportWhat::All;
    const ConsolidateReport report = consolidate(f.run, f.out, f.options);
    CHECK(report.step == 7);
    f.check_weights(f.out / "model.safetensors");
    const Json own = Json::parse(read_text(f.out / "tessera.json"));
    CHECK(own == Json{{"model", Json::parse(section)}, {"step", 7}});
    const SafetensorsReader moments(f.out / "optimizer.safetensors");
    CHECK(moments.header().tensors.size() == 2 * f.model.tensors.size());
  }
}

TEST_CASE("an own model is exported for Hugging Face with a config.json") {
  Fixture f;
  const std::string config = f.named("config.json", R"({"model_type": "llama", "hidden_size": 8,
                                                         "torch_dtype": "float32"})");
  f.named("tokenizer.json", "theirs");
  f.options.config_file = config;
  f.options.dtype = DType::BF16;
  std::vector<std::string> warnings;
  f.options.warn = [&](const std::string& text) { warnings.push_back(text); };
  consolidate(f.run, f.out, f.options);
  CHECK(Json::parse(read_text(f.out / "config.json")) ==
        Json{{"model_type", "llama"}, {"hidden_size", 8}, {"torch_dtype", "bfloat16"}});
  CHECK(read_text(f.out / "tokenizer.json") == "theirs");
  CHECK(SafetensorsReader(f.out / "model.safetensors").header().tensors.size() ==
        f.model.tensors.size());
  REQUIRE(warnings.size() == 1);
  CHECK(holds(warnings[0], "which this export does not know, so names, shapes and number"));
}

TEST_CASE("without a config.json, the error says what to do") {
  Fixture f;
  CHECK_THROWS_HOLDING(
      InvalidArgument,
      "has a model of arch \"tiny-llama\", which this export does not know; give its Hugging Face "
      "config.json with --config, or write its tensors with --format safetensors",
      consolidate(f.run, f.out, f.options));
  f.options.config_file = f.named("config.json", "{}");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is not an object with a \"model_type\"",
                       consolidate(f.run, f.out, f.options));
  f.options.config_file = f.dir.path() / "absent.json";
  CHECK_THROWS_HOLDING(IoError, "absent.json", consolidate(f.run, f.out, f.options));
  CHECK_FALSE(fs::exists(f.out));
}

}  // namespace
}  // namespace tessera::io
