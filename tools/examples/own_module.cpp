// An operation of one's own with its backward, in a module of one's own, and a check of the gradients.
#include <tessera/tessera.h>
#include <tessera/testing.h>

#include <cstdio>
#include <vector>

namespace ts = tessera;
namespace nn = tessera::nn;
namespace ops = tessera::ops;
using ts::Tensor;

/// x * sigmoid(slope * x). @param slope  []
Tensor swish(const Tensor& x, const Tensor& slope) {
  Tensor s, y;
  {
    const ts::NoGradGuard off(*x.context());  // record() below is the only node of the graph
    s = ops::sigmoid(slope * x);
    y = x * s;
  }
  using ts::autograd::SavedTensor;
  ts::autograd::record(
      "swish", y, {x, slope},
      [x = SavedTensor(x), slope = SavedTensor(slope), s](const Tensor& dy, auto& into) {
        const Tensor &at = x.get("swish"), &a = slope.get("swish");  // throw if changed in place
        const Tensor ds = s * (1.0 - s) * at;
        into.pass(0, dy * (s + a * ds));
        into.pass(1, ops::sum(dy * ds * at));
      });
  return y;
}

struct Swish : nn::Module {
  using Module::Module;
  ts::Parameter slope{*this, "slope", {}, {.kind = ts::Initialization::Kind::Ones}};
  Tensor operator()(const Tensor& x) const { return swish(x, slope); }
};

struct Net : nn::Module {
  nn::Linear up{*this, "up", {.in = 3, .out = 8}};
  Swish swish{*this, "swish"};
  nn::Linear down{*this, "down", {.in = 8, .out = 2}};
  Tensor operator()(const Tensor& x) const { return down(swish(up(x))); }
};

int main() {
  const auto context = ts::Context::create();
  Net net;
  ts::materialize(net, context, ts::DType::F64,
                  [](const ts::Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                    ts::initialize_range(p, /*seed=*/1, begin, end, out);
                  });
  std::vector<Tensor> inputs{Tensor::from(context, {{0.5, -1, 2}, {1, 0, -3}}, ts::DType::F64)};
  inputs[0].set_requires_grad(true);
  for (ts::Parameter* p : net.parameters()) inputs.push_back(p->tensor);
  const auto result = ts::testing::gradcheck([&](const auto& in) { return net(in[0]); }, inputs);
  std::printf("own_module: %s\n", result.str().c_str());
  return result.ok() ? 0 : 1;
}
