#include "tests/support/golden.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "io/data/token_file.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"

namespace tessera::test {
namespace {

const std::string kPrefix = "transformer.";

std::vector<float> read_all(const test::SafetensorsReader& reader,
                            const io::SafetensorsEntry& entry) {
  std::vector<float> values(static_cast<std::size_t>(numel(entry.shape)));
  reader.read(entry.name, 0, numel(entry.shape), values.data(), DType::F32);
  return values;
}

// Tensors named `kind` + "transformer." + name, by that name.
std::map<std::string, std::vector<float>> read_named(const test::SafetensorsReader& reader,
                                                     const std::string& kind) {
  std::map<std::string, std::vector<float>> result;
  for (const auto& entry : reader.header().tensors) {
    if (entry.name.rfind(kind + kPrefix, 0) != 0) continue;
    result[entry.name.substr(kind.size() + kPrefix.size())] = read_all(reader, entry);
  }
  return result;
}

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

}  // namespace

Golden load_golden(const std::string& name) {
  Golden golden;
  golden.folder = test::source_path("tests/golden/" + name);
  const auto config = read_json(golden.folder + "/config.json");
  golden.config = {.n_layer = config["n_layer"],
                   .n_head = config["n_head"],
                   .n_embd = config["n_embd"],
                   .vocab_size = config["vocab_size"],
                   .seq_len = config["n_positions"],
                   .norm_eps = config["layer_norm_epsilon"]};
  const auto expected = read_json(golden.folder + "/expected.json");
  golden.batch = expected["batch"];
  golden.seq = expected["seq"];
  golden.lr = expected["lr"];
  golden.beta1 = expected["betas"][0];
  golden.beta2 = expected["betas"][1];
  golden.eps = expected["eps"];
  golden.weight_decay = expected["weight_decay"];
  golden.clip_norm = expected["clip_norm"];
  golden.loss = expected["loss"].get<std::vector<double>>();
  golden.grad_norm = expected["grad_norm"].get<std::vector<double>>();
  golden.steps = static_cast<std::int64_t>(golden.loss.size());

  const test::SafetensorsReader weights(golden.folder + "/model.safetensors");
  golden.weights = read_named(weights, "");
  const test::SafetensorsReader values(golden.folder + "/expected.safetensors");
  golden.gradients = read_named(values, "grad.");
  golden.after = read_named(values, "after.");
  golden.logits = read_all(values, *values.find("logits"));

  const auto tokens = io::open_token_file(golden.folder + "/tokens.bin");
  golden.tokens.resize(static_cast<std::size_t>(tokens->size()));
  tokens->read(0, tokens->size(), golden.tokens.data());
  return golden;
}

ParameterSource Golden::source() const {
  return [this](const Parameter& parameter, std::int64_t begin, std::int64_t end, float* out) {
    const auto& values = weights.at(parameter.name);
    std::copy(values.begin() + begin, values.begin() + end, out);
  };
}

double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  require(actual.size() == expected.size(), "{} values, expected {}", actual.size(),
          expected.size());
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double d = static_cast<double>(actual[i]) - static_cast<double>(expected[i]);
    difference += d * d;
    norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
}

}  // namespace tessera::test
