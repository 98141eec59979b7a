#include "io/hf/model_source.h"

#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/family.h"
#include "io/hf/gpt2_config.h"
#include "io/safetensors/writer.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const fs::path kGolden = test::source_path("tests/golden");

std::vector<float> read_all(const ModelSource& source, const TensorInfo& tensor) {
  std::vector<float> values(static_cast<std::size_t>(numel(tensor.shape)));
  source.read(tensor.name, 0, numel(tensor.shape), values.data(), DType::F32);
  return values;
}

// A Hugging Face directory whose tensors tests modify before it is written.
struct HfDirectory {
  TempDir dir;
  SampleModel model = make_sample_model();
  Json config = gpt2_config_to_hf(Json::parse(model.config), DType::F32);
  struct Stored {
    DType dtype = DType::F32;
    Shape shape;
    std::string bytes;
  };
  std::map<std::string, Stored> tensors;

  HfDirectory() {
    for (const auto& tensor : model.tensors) {
      tensors["transformer." + tensor.name] = stored(tensor.shape, tensor.weight);
    }
  }
  static Stored stored(const Shape& shape, const std::vector<float>& values) {
    return {DType::F32, shape,
            std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4)};
  }
  void write_file(const std::string& file, const std::map<std::string, Stored>& content) const {
    std::vector<SafetensorsSpec> specs;
    for (const auto& [name, tensor] : content) specs.push_back({name, tensor.dtype, tensor.shape});
    const SafetensorsPlan plan = plan_safetensors(specs);
    std::string bytes = plan.preamble;
    for (const auto& entry : plan.tensors) bytes += content.at(entry.name).bytes;
    write_text(dir.path() / file, bytes);
  }
  const fs::path& write() const {
    write_text(dir.path() / "config.json", config.dump());
    write_file("model.safetensors", tensors);
    return dir.path();
  }
};

TEST_CASE("the golden models are opened with tessera's names") {
  for (const char* name : {"gpt2-tiny", "gpt2-odd"}) {
    CAPTURE(name);
    const auto source = open_model(kGolden / name);
    CHECK(source->config().at("arch") == "gpt2");
    CHECK(source->checkpoint() == nullptr);
    const SafetensorsReader file(kGolden / name / "model.safetensors");
    CHECK(source->tensors().size() == file.header().tensors.size());
    for (const TensorInfo& tensor : source->tensors()) {
      std::vector<float> direct(static_cast<std::size_t>(numel(tensor.shape)));
      file.read("transformer." + tensor.name, 0, numel(tensor.shape), direct.data(), DType::F32);
      CHECK(read_all(*source, tensor) == direct);
    }
  }
  const auto odd = open_model(kGolden / "gpt2-odd");
  CHECK(odd->config() == Json{{"arch", "gpt2"},
                              {"n_layer", 3},
                              {"n_head", 5},
                              {"n_embd", 40},
                              {"vocab_size", 97},
                              {"seq_len", 20},
                              {"layer_norm_eps", 1e-5},
                              {"dropout", 0.0}});
}

TEST_CASE("a configuration survives the conversion to Hugging Face's and back") {
  Json ours{{"arch", "gpt2"},         {"n_layer", 3},     {"n_head", 5},
            {"n_embd", 40},           {"vocab_size", 97}, {"seq_len", 20},
            {"layer_norm_eps", 1e-6}, {"dropout", 0.25}};
  Json theirs = gpt2_config_to_hf(ours, DType::BF16);
  CHECK(theirs.at("torch_dtype") == "bfloat16");
  CHECK(gpt2_config_from_hf(theirs, "config.json") == ours);
  theirs["eos_token_id"] = 50256;  // beyond the vocabulary
  CHECK(gpt2_config_from_hf(theirs, "config.json") == ours);
  theirs["eos_token_id"] = 96;
  ours["eos_token_ids"] = Json::array({96});
  CHECK(gpt2_config_from_hf(theirs, "config.json") == ours);
  CHECK(gpt2_config_to_hf(ours, DType::BF16) == theirs);
}

TEST_CASE("checkpoints and runs are models too") {
  TempDir run;
  const SampleModel model = make_sample_model();
  save(model, run.path() / "checkpoints", {.world_size = 3, .step = 5});
  const fs::path newest = save(model, run.path() / "checkpoints", {.world_size = 2, .step = 9});
  write_text(run.path() / "config.json", "{}");  // the run's, not a Hugging Face model's
  for (const fs::path& path : {run.path(), run.path() / "checkpoints", newest}) {
    const auto source = open_model(path);
    CHECK(source->path() == newest);
    CHECK(source->config() == Json::parse(model.config));
    for (const TensorInfo& tensor : source->tensors()) {
      CHECK(read_all(*source, tensor) == model.at(tensor.name).weight);
    }
  }
  CHECK(open_model(run.path(), 5)->checkpoint()->index().step == 5);
  CHECK_THROWS_HOLDING(IoError, "does not exist", open_model(run.path() / "absent"));
  CHECK_THROWS_HOLDING(InvalidArgument, "is a file", open_model(run.path() / "config.json"));
  CHECK_THROWS_HOLDING(InvalidArgument, "has no step 5", open_model(kGolden / "gpt2-tiny", 5));
}

TEST_CASE("names without prefix, buffers, and a separately stored tied head are accepted") {
  HfDirectory hf;
  std::map<std::string, HfDirectory::Stored> plain;
  for (const auto& [name, tensor] : hf.tensors)
    plain[name.substr(std::string("transformer.").size())] = tensor;
  plain["h.0.attn.bias"] = {DType::U8, {1, 1, 2, 2}, "abcd"};
  plain["h.1.attn.masked_bias"] = HfDirectory::stored({}, {-1e4F});
  plain["lm_head.weight"] = plain["wte.weight"];
  hf.tensors = plain;
  const auto source = open_model(hf.write());
  CHECK(source->tensors().size() == hf.model.tensors.size());
  CHECK(read_all(*source, {"wte.weight", hf.model.at("wte.weight").shape, DType::F32}) ==
        hf.model.at("wte.weight").weight);

  hf.tensors["lm_head.weight"].bytes[3] ^= 1;
  CHECK_THROWS_HOLDING(InvalidArgument, "unexpected: lm_head.weight [", open_model(hf.write()));
}

TEST_CASE("half precision is read as f32") {
  HfDirectory hf;
  auto& bias = hf.tensors["transformer.ln_f.bias"];
  bias.dtype = DType::F16;
  bias.bytes.clear();
  // 1, -2, 65504 (largest), 2^-24 (smallest), -0, 0.333..., infinity; then zeros
  const std::uint16_t halves[10] = {0x3c00, 0xc000, 0x7bff, 0x0001, 0x8000,
                                    0x3555, 0x7c00, 0,      0,      0};
  bias.bytes.assign(reinterpret_cast<const char*>(halves), sizeof(halves));
  auto& weight = hf.tensors["transformer.ln_f.weight"];
  weight.dtype = DType::BF16;
  weight.bytes.clear();
  for (int i = 0; i < 10; ++i) {
    const BFloat16 value(static_cast<float>(i) - 3);
    weight.bytes.append(reinterpret_cast<const char*>(&value), 2);
  }
  const auto source = open_model(hf.write());
  const auto half = read_all(*source, {"ln_f.bias", {10}, DType::F16});
  const float expected[] = {1, -2, 65504, 0x1p-24F, -0.0F, 0.333251953125F};
  for (std::size_t i = 0; i < 6; ++i) CHECK(half[i] == expected[i]);
  CHECK(half[6] > 1e30F);
  CHECK(read_all(*source, {"ln_f.weight", {10}, DType::BF16})[4] == 1);
}

TEST_CASE("all mismatched tensors are listed at once") {
  HfDirectory hf;
  hf.tensors.erase("transformer.ln_f.bias");
  hf.tensors.erase("transformer.h.1.ln_2.weight");
  hf.tensors["transformer.extra"] = HfDirectory::stored({1}, {0});
  auto& fc = hf.tensors["transformer.h.0.mlp.c_fc.weight"];
  fc.shape = {40, 10};  // the layout of Linear instead of Conv1D
  std::string message;
  try {
    open_model(hf.write());
  } catch (const InvalidArgument& error) {
    message = error.what();
  }
  for (const char* part :
       {"missing: transformer.ln_f.bias [10]", "missing: transformer.h.1.ln_2.weight [10]",
        "unexpected: transformer.extra [1]",
        "shape: transformer.h.0.mlp.c_fc.weight is [40, 10], expected [10, 40]"}) {
    CAPTURE(message);
    CHECK(holds(message, part));
  }
}

TEST_CASE("settings that change the computation are refused") {
  HfDirectory hf;
  const auto refuse = [&](const char* key, const Json& value, const char* reason) {
    HfDirectory other;
    other.config[key] = value;
    CHECK_THROWS_HOLDING(Unsupported, reason, open_model(other.write()));
  };
  refuse("model_type", "t5", "model_type \"t5\" cannot be imported");
  refuse("n_inner", 41, "n_inner is 41");
  refuse("activation_function", "relu", "\"activation_function\" is \"relu\"");
  refuse("tie_word_embeddings", false, "\"tie_word_embeddings\" is false");
  refuse("scale_attn_by_inverse_layer_idx", true, "scale_attn_by_inverse_layer_idx");
  hf.config["n_head"] = 3;
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "n_head 3 does not divide n_embd 10",
                       open_model(hf.write()));
  hf.config.erase("n_head");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "\"n_head\" is missing", open_model(hf.write()));
}

TEST_CASE("sharded models are read through their index") {
  HfDirectory hf;
  std::map<std::string, HfDirectory::Stored> first, second;
  Json map = Json::object();
  for (const auto& [name, tensor] : hf.tensors) {
    const bool one = first.size() < 5;
    (one ? first : second)[name] = tensor;
    map[name] = one ? "a.safetensors" : "b.safetensors";
  }
  hf.write();
  fs::remove(hf.dir.path() / "model.safetensors");
  hf.write_file("a.safetensors", first);
  hf.write_file("b.safetensors", second);
  const fs::path index = hf.dir.path() / "model.safetensors.index.json";
  write_text(index, Json{{"weight_map", map}}.dump());
  const auto source = open_model(hf.dir.path());
  for (const TensorInfo& tensor : source->tensors()) {
    CHECK(read_all(*source, tensor) == hf.model.at(tensor.name).weight);
  }
  map["transformer.ln_f.bias"] = "a.safetensors";
  write_text(index, Json{{"weight_map", map}}.dump());
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "transformer.ln_f.bias is not in a.safetensors",
                       open_model(hf.dir.path()));
  map["transformer.ln_f.bias"] = "../b.safetensors";
  write_text(index, Json{{"weight_map", map}}.dump());
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "not a plain file name", open_model(hf.dir.path()));
}

}  // namespace
}  // namespace tessera::io
