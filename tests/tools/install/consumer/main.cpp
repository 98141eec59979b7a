// Uses an installed tessera like research code: an operation and its gradient, a model's size,
// training data, and an export with progress. Exits with 1 on a wrong value.
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

#include "core/autograd/autograd.h"
#include "core/ops/linear.h"
#include "io/consolidate/consolidate.h"
#include "io/data/sampler.h"
#include "io/safetensors/writer.h"
#include "models/gpt2.h"

namespace {

bool consolidates() {
  namespace fs = std::filesystem;
  const fs::path dir =
      fs::temp_directory_path() / ("tessera-consumer-" + std::to_string(::getpid()));
  fs::create_directories(dir / "source");
  const auto plan = tessera::io::plan_safetensors({{"w", tessera::DType::U8, {1 << 20}}});
  std::ofstream(dir / "source/model.safetensors", std::ios::binary)
      << plan.preamble << std::string(1 << 20, 'w');
  tessera::io::ConsolidateProgress last;
  int calls = 0;
  tessera::io::ConsolidateOptions options;
  options.format = tessera::io::ExportFormat::Safetensors;
  options.memory = 512 << 10;  // blocks of a quarter of the tensor
  options.progress = [&](const tessera::io::ConsolidateProgress& progress) {
    last = progress;
    ++calls;
    return true;
  };
  const auto report = tessera::io::consolidate(dir / "source", dir / "out", options);
  const bool good =
      report.tensors == 1 && calls > 1 && last.done == last.total && last.total > 1 << 20 &&
      last.reused == 0 &&
      fs::file_size(dir / "out/model.safetensors") == static_cast<std::uintmax_t>(last.total);
  fs::remove_all(dir);
  return good;
}

}  // namespace

int main() {
  const auto context = tessera::Context::create();
  const std::array<float, 3> x_values = {1, 2, 3};
  const std::array<float, 3> w_values = {4, 5, 6};
  const auto x = tessera::Tensor::from(context, {1, 3}, std::span<const float>(x_values));
  auto w = tessera::Tensor::from(context, {3, 1}, std::span<const float>(w_values));
  w.set_requires_grad(true);
  const auto y = tessera::ops::linear(x, w, {}, tessera::ops::WeightLayout::InOut);
  tessera::autograd::backward(y);

  const tessera::io::Sampler sampler(tessera::io::tokens_in_memory({1, 2, 3, 4}), 3,
                                     tessera::io::DataOrder::Sequential, 0);
  std::array<std::int32_t, 3> inputs{};
  std::array<std::int32_t, 3> targets{};
  sampler.fill_batch(0, 1, inputs.data(), targets.data());

  const tessera::models::Gpt2 model(
      {.n_layer = 1, .n_head = 1, .n_embd = 8, .vocab_size = 16, .seq_len = 4});
  const bool good = y.item() == 32.0 && w.grad().to_vector<float>()[2] == 3.0F && targets[2] == 4 &&
                    model.parameters().size() == 16 && consolidates();
  std::printf("%s\n", good ? "consumer: ok" : "consumer: wrong values");
  return good ? 0 : 1;
}
