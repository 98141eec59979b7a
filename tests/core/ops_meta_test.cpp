// A transformer block and its loss on the meta device, as the planner runs it: the ledger must
// match the CPU's.

#include <doctest/doctest.h>

#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "core/ops/rotary.h"
#include "core/ops/view.h"
#include "tests/support/recorded.h"

namespace tessera {
namespace {

struct Usage {
  std::vector<std::tuple<MemoryCategory, std::string, std::int64_t>> peaks;
  std::int64_t activations_left = 0;
  std::size_t gradients = 0;
};

Usage train_step(DeviceType device, DType dtype, bool recompute) {
  const auto context = Context::create({.device = {device, 0}});
  const std::int64_t batch = 2, time = 32, channels = 48, vocab = 100, heads = 4;
  std::vector<Tensor> parameters;
  const auto parameter = [&](const Shape& shape) {
    parameters.push_back(
        Tensor::full(context, shape, dtype, 0.01, MemoryCategory::Parameters, "weights"));
    return parameters.back().set_requires_grad(true);
  };
  const Tensor tokens = Tensor::from<std::int32_t>(
      context, {batch, time}, std::vector<std::int32_t>(static_cast<std::size_t>(batch * time), 1));
  const Tensor targets = ops::reshape(tokens, {batch * time});
  const Tensor table = parameter({vocab, channels}), positions = parameter({time, channels});
  const Tensor norm_weight = parameter({channels}), norm_bias = parameter({channels});
  const Tensor qkv_weight = parameter({channels, 3 * channels}),
               qkv_bias = parameter({3 * channels});
  const Tensor mlp_weight = parameter({channels, channels}), mlp_bias = parameter({channels});
  const Tensor rms_weight = parameter({channels}),
               gated_weight = parameter({2 * channels, channels});

  const auto block = [&](const Tensor& x) {
    Tensor h = ops::layer_norm(x, norm_weight, norm_bias, 1e-5);
    h = ops::linear(h, qkv_weight, qkv_bias, ops::WeightLayout::InOut);
    h = ops::attention(ops::rotary_packed(h, heads, heads, {.base = 1e4}), {.heads = heads});
    h = ops::linear(h, qkv_weight, qkv_bias, ops::WeightLayout::InOut);
    h = ops::attention(h, {.heads = heads, .window = 3, .softcap = 9.0, .documents = tokens});
    h = ops::gelu(ops::gelu_mlp(h, mlp_weight, mlp_bias, mlp_weight, {}));
    const auto [sum, y] = ops::add_rms_norm(x, ops::dropout(h, 0.1F, 0), rms_weight, 1e-5);
    const Tensor up = ops::linear(y, gated_weight, {});
    const Tensor gated = ops::add(ops::swiglu(up), ops::gated_linear(up, mlp_weight, mlp_bias));
    const auto [last, normed] = ops::add_layer_norm(sum, gated, norm_weight, norm_bias, 1e-5);
    return ops::add(last, ops::rms_norm(normed, rms_weight, 1e-5));
  };
  {
    Tensor x = test::recorded(ops::embedding(tokens, table, positions));
    for (int i = 0; i < 2; ++i) x = recompute ? test::recompute(block, x) : block(x);
    x = ops::reshape(x, {batch * time, channels});
    autograd::backward(ops::linear_cross_entropy(x, table, targets, 1.0 / 64));
  }
  {
    const NoGradGuard off(*context);
    const Tensor cache = Tensor::empty(context, {batch, time, heads, 12}, dtype);
    const Tensor packed = Tensor::full(context, {batch, 3, 3 * channels}, dtype, 0.1);
    CHECK(ops::cached_attention(packed, {.heads = heads, .window = 2}, cache, cache, 5).shape() ==
          Shape{batch, 3, channels});
  }

  Usage usage;
  for (const Tensor& p : parameters) usage.gradients += p.grad().defined() ? 1 : 0;
  CHECK(usage.gradients == parameters.size());
  // The kernels' scratch memory depends on the device.
  for (const MemoryLedger::Line& line : context->ledger().lines())
    if (line.category != MemoryCategory::Workspace)
      usage.peaks.emplace_back(line.category, line.owner, line.usage.peak);
  usage.activations_left = context->ledger().usage(MemoryCategory::Activations).current -
                           static_cast<std::int64_t>(tokens.bytes());
  return usage;
}

TEST_CASE("a training step on the meta device books the same bytes as on the CPU") {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    for (const bool recompute : {false, true}) {
      CAPTURE(dtype_name(dtype));
      CAPTURE(recompute);
      const Usage meta = train_step(DeviceType::Meta, dtype, recompute);
      const Usage cpu = train_step(DeviceType::CPU, dtype, recompute);
      CHECK(meta.peaks.size() > 8);
      CHECK(meta.peaks == cpu.peaks);
      CHECK(meta.activations_left == 0);
      CHECK(cpu.activations_left == 0);
    }
  }
}

}  // namespace
}  // namespace tessera
