#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "io/hf/family.h"
#include "io/safetensors/writer.h"
#include "tests/support/temp_dir.h"

namespace tessera::test {

using io::Json;

/// Uniform numbers in [-1, 1); see numbers() of make_families.py.
class Numbers {
 public:
  explicit Numbers(std::string_view key) : base_(hash(key)) {}
  double at(std::int64_t index) const {
    std::uint64_t x = base_ + (static_cast<std::uint64_t>(index) + 1) * 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    x ^= x >> 31;
    return static_cast<double>(x >> 40) / 8388608.0 - 1.0;
  }

 private:
  static std::uint64_t hash(std::string_view text) {
    std::uint64_t value = 0xCBF29CE484222325U;
    for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
    return value;
  }
  std::uint64_t base_;
};

/// Values of a tensor of this name; see weight() of make_families.py.
inline std::vector<float> weight(const std::string& name, const Shape& shape) {
  const Numbers numbers(name);
  const bool is_vector = shape.size() == 1;
  const bool is_norm = is_vector && name.ends_with("norm.weight");
  std::vector<float> values(static_cast<std::size_t>(numel(shape)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double u = numbers.at(static_cast<std::int64_t>(i));
    values[i] = static_cast<float>(is_norm ? 1.0 + 0.25 * u : is_vector ? 0.25 * u : 0.35 * u);
  }
  return values;
}

/// A model of tests/golden.
struct Case {
  Json json;
  std::string label;
  Json config;  // tessera's "model" section
  std::vector<io::HfTensor> tensors;

  explicit Case(const Json& c) : json(c), label(c.at("label")) {
    const io::HfFamily* const family = io::hf_family_of(c.at("config"));
    REQUIRE(family != nullptr);
    config = family->config_from_hf(c.at("config"), "config.json");
    tensors = family->tensors(config);
  }
  Tensor ids(const std::shared_ptr<Context>& context, const char* key) const {
    std::vector<std::int32_t> flat;
    for (const auto& row : json.at(key))
      for (const std::int32_t id : row) flat.push_back(id);
    const auto rows = std::ssize(json.at(key));
    return Tensor::from<std::int32_t>(context, {rows, std::ssize(flat) / rows}, flat);
  }
};

/// Writes a safetensors file of weights that are functions of their names.
inline void write_weights(const TempDir& dir, const std::string& file,
                          const std::vector<io::SafetensorsSpec>& specs) {
  const io::SafetensorsPlan plan = io::plan_safetensors(specs);
  std::string bytes = plan.preamble;
  for (const std::size_t i : plan.order) {
    const std::vector<float> values = weight(specs[i].name, specs[i].shape);
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  }
  dir.write(file, bytes);
}

/// Writes a Hugging Face directory.
inline void write_model(const Case& c, const TempDir& dir) {
  std::vector<io::SafetensorsSpec> specs;
  for (const io::HfTensor& tensor : c.tensors)
    for (const io::HfTensor::Part& part : tensor.parts)
      specs.push_back({part.name, DType::F32, tensor.shape_of(part)});
  write_weights(dir, "model.safetensors", specs);
  dir.write("config.json", c.json.at("config").dump());
}

/// Norm of a whole gradient. @param gradients  of a case: norm and two products of each tensor
inline double norm_of(const Json& gradients) {
  double squares = 0;
  for (const auto& [name, expected] : gradients.items())
    squares += expected[0].get<double>() * expected[0].get<double>();
  return std::sqrt(squares);
}

/// Compares a tensor's gradient with its norm and products. @param total  norm of the whole gradient
inline void check_gradient(const std::string& name, std::span<const double> gradient,
                           const Json& expected, double total) {
  const Numbers a("a " + name), b("b " + name);
  double squares = 0, with_a = 0, with_b = 0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    squares += gradient[i] * gradient[i];
    with_a += gradient[i] * a.at(at);
    with_b += gradient[i] * b.at(at);
  }
  CHECK(std::abs(std::sqrt(squares) - expected[0].get<double>()) < 1e-5 * total);
  CHECK(std::abs(with_a - expected[1].get<double>()) < 1e-5 * total);
  CHECK(std::abs(with_b - expected[2].get<double>()) < 1e-5 * total);
}

}  // namespace tessera::test
