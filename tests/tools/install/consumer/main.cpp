// Uses an installed tessera like research code: an own model and its loop, training data, and an
// export with progress. Exits with 1 on a wrong value.
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

#include "comm/sharding/sharded_model.h"
#include "comm/single.h"
#include "core/nn/layers.h"
#include "core/ops/elementwise.h"
#include "core/ops/reduction.h"
#include "core/ops/unary.h"
#include "core/optim/adamw.h"
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

namespace ts = tessera;

struct Net : ts::nn::Module {
  ts::nn::Linear up{*this, "up", {.in = 1, .out = 16}}, down{*this, "down", {.in = 16, .out = 1}};
  ts::Tensor operator()(const ts::Tensor& x) {
    const ts::Tensor h = ts::ops::tanh(ts::nn::unit(up, x));
    return ts::nn::unit(down, h);
  }
};

// Fits a line of 32 points. Returns the last loss.
double train() {
  const auto context = ts::Context::create();
  const auto alone = ts::comm::make_single_communicator();
  const ts::comm::Mesh mesh(*alone);
  Net net;
  ts::comm::ShardedModel model(net, mesh, {}, context);
  model.initialize(1);
  std::array<float, 32> points{};
  for (std::size_t i = 0; i < points.size(); ++i) points[i] = static_cast<float>(i) / 16 - 1;
  const auto x = ts::Tensor::from(context, {32, 1}, std::span<const float>(points));
  const auto factor = ts::Tensor::full(context, {1}, ts::DType::F32, 1.0);
  const ts::optim::AdamW adamw({.weight_decay = 0});
  double last = 0;
  for (int step = 1; step <= 200; ++step) {
    model.begin_micro_batch(true, true);
    const ts::Tensor error = net(x) - 0.5 * x;
    const ts::Tensor loss = ts::ops::mean(error * error);
    ts::autograd::backward(loss);
    model.end_micro_batch();
    model.step(adamw, {.lr = 1e-2, .step = step, .factor = factor});
    last = loss.item();
  }
  return last;
}

int main() {
  const tessera::io::Sampler sampler(tessera::io::tokens_in_memory({1, 2, 3, 4}), 3,
                                     tessera::io::DataOrder::Sequential, 0);
  std::array<std::int32_t, 3> inputs{};
  std::array<std::int32_t, 3> targets{};
  sampler.fill_batch(0, 1, inputs.data(), targets.data());

  const tessera::models::Gpt2 model(
      {.n_layer = 1, .n_head = 1, .n_embd = 8, .vocab_size = 16, .seq_len = 4});
  const bool good =
      train() < 1e-4 && targets[2] == 4 && model.parameters().size() == 16 && consolidates();
  std::printf("%s\n", good ? "consumer: ok" : "consumer: wrong values");
  return good ? 0 : 1;
}
