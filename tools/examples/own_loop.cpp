// A perceptron that learns a parabola, and its training loop, on one rank.
#include <tessera/tessera.h>
#include <tessera/train.h>

#include <cstdio>
#include <vector>

namespace ts = tessera;
namespace nn = tessera::nn;
namespace ops = tessera::ops;

struct Net : nn::Module {
  nn::Linear up{*this, "up", {.in = 1, .out = 32, .init = {ts::Initialization::Kind::Normal, 1}}};
  nn::Linear down{*this, "down", {.in = 32, .out = 1}};
  ts::Tensor operator()(const ts::Tensor& x) { return nn::unit(down, ops::tanh(nn::unit(up, x))); }
};

int main() {
  ts::train::Rank rank = ts::train::join();  // alone, unless a launcher started more
  const ts::comm::Mesh mesh(*rank.communicator);
  Net net;
  ts::comm::ShardedModel model(net, mesh, ts::comm::shard_spec("full"), rank.context);
  model.initialize(/*seed=*/1);
  const ts::optim::AdamW adamw({.weight_decay = 0});
  std::vector<float> points;
  for (int i = -32; i < 32; ++i) points.push_back(static_cast<float>(i) / 32);
  const auto x = ts::Tensor::from<float>(rank.context, {64, 1}, points);
  ts::train::StepTotals last;
  for (int n = 0; n < 500; ++n) {
    ts::train::Step step(model, {.step = n});
    step.micro_batch(0, [&] {
      const ts::Tensor error = net(x) - x * x;
      return ops::mean(error * error);
    });
    last = step.finish(adamw, {.lr = 1e-2});
    if (n % 100 == 99) std::printf("step %d: loss %g\n", n + 1, last.loss);
  }
  return last.loss < 1e-3 ? 0 : 1;
}
