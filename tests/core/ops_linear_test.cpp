#include <doctest/doctest.h>

#include <functional>
#include <optional>

#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/ops/activation.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "tests/support/gradcheck.h"
#include "tests/support/paths.h"
#include "tests/support/recorded.h"

namespace tessera::test {
namespace {

using ops::Gate;
using ops::WeightLayout;

TEST_CASE("linear: both layouts, with and without bias, by hand") {
  const auto context = Context::create();
  const Tensor x = Tensor::from<float>(context, {2, 2}, std::vector<float>{1, 2, 3, 4});
  const Tensor w = Tensor::from<float>(context, {3, 2}, std::vector<float>{1, 0, 0, 1, 10, 100});
  const Tensor t = Tensor::from<float>(context, {2, 3}, std::vector<float>{1, 0, 10, 0, 1, 100});
  const Tensor b = Tensor::from<float>(context, {3}, std::vector<float>{0.5F, 0, -1});
  const std::vector<float> plain{1, 2, 210, 3, 4, 430}, biased{1.5F, 2, 209, 3.5F, 4, 429};
  CHECK(ops::linear(x, w, {}).to_vector<float>() == plain);
  CHECK(ops::linear(x, t, {}, WeightLayout::InOut).to_vector<float>() == plain);
  CHECK(ops::linear(x, w, b).to_vector<float>() == biased);
  CHECK(ops::linear(x, t, b, WeightLayout::InOut).to_vector<float>() == biased);
}

TEST_CASE("linear: gradients, over odd shapes") {
  const auto context = Context::create();
  for (const auto& [lead, in, out] : std::vector<std::tuple<Shape, std::int64_t, std::int64_t>>{
           {{}, 3, 2}, {{1}, 1, 1}, {{5}, 3, 7}, {{2, 3}, 5, 4}, {{2, 1, 3}, 2, 9}}) {
    for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut}) {
      Shape shape = lead;
      shape.push_back(in);
      CAPTURE(shape.str());
      const Shape weight_shape = layout == WeightLayout::OutIn ? Shape{out, in} : Shape{in, out};
      Tensor x = random_tensor(context, shape, DType::F64, 1).set_requires_grad(true);
      Tensor w = random_tensor(context, weight_shape, DType::F64, 2).set_requires_grad(true);
      Tensor b = random_tensor(context, {out}, DType::F64, 3).set_requires_grad(true);
      const auto with_bias = [&](const std::vector<Tensor>& t) {
        return ops::linear(t[0], t[1], t[2], layout);
      };
      const auto without_bias = [&](const std::vector<Tensor>& t) {
        return ops::linear(t[0], t[1], {}, layout);
      };
      CHECK(gradcheck(with_bias, {x, w, b}) == "");
      CHECK(gradcheck(without_bias, {x, w}) == "");
      // Frozen weights, or an input without gradient, leave the other gradients correct.
      CHECK(gradcheck(with_bias, {x, w.detach(), b.detach()}) == "");
      CHECK(gradcheck(with_bias, {x.detach(), w, b}) == "");
      CHECK(gradcheck(with_bias, {x.detach(), w.detach(), b}) == "");
    }
  }
}

TEST_CASE("linear: bf16 matches f32") {
  const auto context = Context::create();
  for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut}) {
    const auto f = [&](const std::vector<Tensor>& t) {
      return ops::linear(t[0], t[1], t[2], layout);
    };
    const Shape weight = layout == WeightLayout::OutIn ? Shape{17, 33} : Shape{33, 17};
    CHECK(compare_bf16(f,
                       {random_tensor(context, {5, 33}, DType::BF16, 1),
                        random_tensor(context, weight, DType::BF16, 2),
                        random_tensor(context, {17}, DType::BF16, 3)},
                       0.01) == "");
  }
}

TEST_CASE("linear: with a frozen weight the input is not saved") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {64, 8}, DType::F32, 1).set_requires_grad(true);
  const Tensor w = random_tensor(context, {8, 8}, DType::F32, 2);
  const Tensor y = ops::linear(ops::linear(x, w, {}), w, {});
  const auto two = static_cast<std::int64_t>(2 * x.bytes() + w.bytes());
  CHECK(context->ledger().total().current == two);
}

TEST_CASE("linear: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  const Tensor w = random_tensor(context, {4, 3}, DType::F32, 2);
  CHECK_THROWS_WITH_AS(
      ops::linear(x, w, {}, WeightLayout::InOut),
      doctest::Contains("must be 4, as weight is [4, 3] ([in, out]); got x of shape [2, 3]"),
      InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(x, w, x), doctest::Contains("bias must have shape [4]"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(x, convert(w, DType::BF16), {}),
                       doctest::Contains("weight must have dtype f32, got bf16"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(x, random_tensor(context, {4}, DType::F32, 2), {}),
                       doctest::Contains("must be [out, in], got shape [4]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(Tensor::empty(context, {2, 3}, DType::I32), w, {}),
                       doctest::Contains("got i32"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(x.alias({3, 2}, {1, 3}, 0), w, {}),
                       doctest::Contains("x must be contiguous"), InvalidArgument);
  const auto other = Context::create();
  CHECK_THROWS_WITH_AS(ops::linear(x, random_tensor(other, {4, 3}, DType::F32, 2), {}),
                       doctest::Contains("linear: tensors of different contexts"), InvalidArgument);
}

TEST_CASE("gated_linear: bit-identical to its parts, also on a device, and keeps x alone") {
  const auto outcome = [](const std::shared_ptr<Context>& context, DType dtype, WeightLayout layout,
                          Gate gate, bool joined) {
    const Shape weight = layout == WeightLayout::OutIn ? Shape{7, 33} : Shape{33, 7};
    const auto leaf = [&](const Shape& shape, std::uint64_t seed) {
      return random_tensor(context, shape, dtype, seed).set_requires_grad(true);
    };
    const Tensor x = leaf({2, 3, 66}, 1), w = leaf(weight, 2), b = leaf({7}, 3);
    const auto pass = [&] {
      if (joined) return ops::gated_linear(x, w, b, layout, gate);
      return ops::linear(gate == Gate::Silu ? ops::swiglu(x) : ops::geglu(x), w, b, layout);
    };
    const auto held = [&] { return context->ledger().total().current; };
    std::vector<std::vector<double>> values;
    for (const std::uint64_t seed : {4U, 5U}) {
      const std::int64_t before = held();
      const Tensor y = pass();
      const auto result = static_cast<std::int64_t>(y.bytes());
      if (joined) CHECK(held() - before == result);
      values.push_back(values_of(y));
      autograd::backward(y, random_tensor(context, y.shape(), dtype, seed));
    }
    for (const Tensor& t : {x, w, b}) values.push_back(values_of(t.grad()));
    return values;
  };
  const auto host = Context::create({.threads = 2});
  const auto fibers = Context::create({.device = {DeviceType::CUDA, 0}, .plugin = fiber_plugin()});
  for (const auto& context : {host, fibers})
    for (const DType dtype : {DType::F32, DType::BF16})
      for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut})
        for (const Gate gate : {Gate::Silu, Gate::Gelu})
          CHECK(outcome(context, dtype, layout, gate, true) ==
                outcome(context, dtype, layout, gate, false));
}

TEST_CASE("gated_linear: gradients, and refuses invalid arguments") {
  const auto context = Context::create();
  const auto leaf = [&](const Shape& shape, std::uint64_t seed) {
    return random_tensor(context, shape, DType::F64, seed).set_requires_grad(true);
  };
  const Tensor x = leaf({2, 3, 10}, 1), w = leaf({4, 5}, 2);
  CHECK(gradcheck([](const auto& t) { return ops::gated_linear(t[0], t[1], t[2]); },
                  {x, w, leaf({4}, 3)}) == "");
  CHECK_THROWS_WITH_AS(ops::gated_linear(x, w, {}, WeightLayout::InOut),
                       "gated_linear: the last dim of x must be 8, gate and up of the 4 inputs of "
                       "weight [4, 5]; got "
                       "x of shape [2, 3, 10]",
                       InvalidArgument);
}

TEST_CASE("a residual: gradients, and the same as an addition") {
  const auto context = Context::create({.threads = 2});
  constexpr auto kLayout = WeightLayout::OutIn;
  struct Layer {
    std::vector<Shape> shapes;  // of x, of the weights, of the residual last
    std::function<Tensor(const std::vector<Tensor>&, const Tensor& residual)> run;
  };
  const std::vector<Layer> layers = {
      {{{2, 3, 6}, {6, 6}, {2, 3, 6}},
       [](const auto& t, const Tensor& r) { return ops::linear(t[0], t[1], {}, kLayout, {}, r); }},
      {{{2, 3, 6}, {4, 3}, {2, 3, 4}},
       [](const auto& t, const Tensor& r) {
         return ops::gated_linear(t[0], t[1], {}, kLayout, Gate::Silu, r);
       }},
      {{{2, 3, 6}, {4, 6}, {6, 4}, {2, 3, 6}}, [](const auto& t, const Tensor& r) {
         return ops::gelu_mlp(t[0], t[1], {}, t[2], {}, kLayout, r);
       }}};
  for (const Layer& layer : layers) {
    CAPTURE(layer.shapes.back().str());
    const auto inputs = [&](DType dtype, bool trainable) {
      std::vector<Tensor> t;
      for (const Shape& shape : layer.shapes)
        t.push_back(random_tensor(context, shape, dtype, t.size()).set_requires_grad(trainable));
      return t;
    };
    const auto joined = [&](const std::vector<Tensor>& t) { return layer.run(t, t.back()); };
    CHECK(gradcheck(joined, inputs(DType::F64, true)) == "");
    CHECK(compare_bf16(joined, inputs(DType::BF16, true), 0.02) == "");
    const auto in_between = [&](const std::vector<Tensor>& t) {
      const Tensor r = ops::gelu(t.back());
      return ops::mul(layer.run(t, r), r);
    };
    CHECK(gradcheck(in_between, inputs(DType::F64, true)) == "");
    if (layer.shapes.front() == layer.shapes.back()) {
      const auto of_input = [&](const std::vector<Tensor>& t) { return layer.run(t, t.front()); };
      auto t = inputs(DType::F64, true);
      t.pop_back();
      CHECK(gradcheck(of_input, t) == "");
    }
    auto frozen = inputs(DType::F64, false);
    frozen.back().set_requires_grad(true);  // alone
    CHECK(gradcheck(joined, frozen) == "");

    const auto apart = values_of(ops::add(frozen.back(), layer.run(frozen, {})));
    const auto once = values_of(joined(frozen));
    for (std::size_t i = 0; i < once.size(); ++i) CHECK(once[i] == doctest::Approx(apart[i]));
    CHECK_THROWS_WITH_AS(layer.run(frozen, Tensor::empty(context, {2, 3, 5}, DType::F64)),
                         doctest::Contains(": residual must have shape "), InvalidArgument);
  }
}

struct MlpShape {
  Shape x;  // [..., in]
  std::int64_t hidden, out;
};

/// x, fc_weight, fc_bias, proj_weight, proj_bias; bit i of `wanted`: input i requires a gradient.
std::vector<Tensor> mlp_inputs(const std::shared_ptr<Context>& context, const MlpShape& shape,
                               WeightLayout layout, DType dtype, unsigned wanted) {
  const auto matrix = [&](std::int64_t in, std::int64_t out) {
    return layout == WeightLayout::OutIn ? Shape{out, in} : Shape{in, out};
  };
  const Shape shapes[] = {shape.x,
                          matrix(shape.x.back(), shape.hidden),
                          {shape.hidden},
                          matrix(shape.hidden, shape.out),
                          {shape.out}};
  std::vector<Tensor> inputs;
  for (unsigned i = 0; i < 5; ++i)
    inputs.push_back(
        random_tensor(context, shapes[i], dtype, 1 + i).set_requires_grad((wanted >> i & 1U) != 0));
  return inputs;
}

Tensor separate_mlp(const std::vector<Tensor>& t, WeightLayout layout) {
  return ops::linear(ops::gelu(ops::linear(t[0], t[1], t[2], layout)), t[3], t[4], layout);
}

Tensor joined_mlp(const std::vector<Tensor>& t, WeightLayout layout) {
  return ops::gelu_mlp(t[0], t[1], t[2], t[3], t[4], layout);
}

using Mlp = Tensor (*)(const std::vector<Tensor>&, WeightLayout);

/// Result and gradients accumulated over two passes.
std::vector<std::optional<std::vector<double>>> mlp_outcome(const std::vector<Tensor>& inputs,
                                                            Mlp mlp, WeightLayout layout,
                                                            bool recompute) {
  std::vector<std::optional<std::vector<double>>> outcome;
  for (Tensor input : inputs)
    if (input.defined()) input.zero_grad();
  for (const std::uint64_t pass : {7U, 8U}) {
    std::vector<Tensor> t = inputs;
    const auto block = [&](const Tensor& x) {
      std::vector<Tensor> of_block = t;
      of_block[0] = x;
      return mlp(of_block, layout);
    };
    const Tensor y = recompute ? test::recompute(block, t[0]) : block(t[0]);
    outcome.emplace_back(values_of(y));
    if (y.requires_grad())
      autograd::backward(y, random_tensor(y.context(), y.shape(), y.dtype(), pass));
  }
  for (const Tensor& input : inputs) {
    outcome.emplace_back();
    if (input.defined() && input.grad().defined()) outcome.back() = values_of(input.grad());
  }
  return outcome;
}

TEST_CASE("gelu_mlp: gradients, over odd shapes") {
  const auto context = Context::create();
  for (const MlpShape& shape :
       {MlpShape{{3}, 4, 2}, {{1, 1}, 1, 1}, {{5, 3}, 7, 3}, {{2, 3, 2}, 5, 4}})
    for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut}) {
      CAPTURE(shape.x.str());
      const auto with_biases = [&](const std::vector<Tensor>& t) { return joined_mlp(t, layout); };
      const auto without = [&](const std::vector<Tensor>& t) {
        return ops::gelu_mlp(t[0], t[1], {}, t[2], {}, layout);
      };
      const auto t = mlp_inputs(context, shape, layout, DType::F64, 31);
      CHECK(gradcheck(with_biases, t) == "");
      CHECK(gradcheck(without, {t[0], t[1], t[3]}) == "");
    }
}

void check_same_as_parts(const std::shared_ptr<Context>& context, DType dtype, WeightLayout layout,
                         unsigned wanted, bool recompute) {
  CAPTURE(context->device().str());
  CAPTURE(dtype_name(dtype));
  CAPTURE(wanted);
  CAPTURE(recompute);
  auto inputs = mlp_inputs(context, {{2, 3, 9}, 33, 7}, layout, dtype, wanted);
  if (wanted % 3 == 1) inputs[2] = {};
  if (wanted % 5 == 1) inputs[4] = {};
  CHECK(mlp_outcome(inputs, joined_mlp, layout, recompute) ==
        mlp_outcome(inputs, separate_mlp, layout, recompute));
}

TEST_CASE("gelu_mlp: bit-identical to its parts, for every subset of required gradients") {
  const auto context = Context::create({.threads = 2});
  for (const DType dtype : {DType::F64, DType::F32, DType::BF16})
    for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut})
      for (unsigned wanted = 0; wanted < 32; ++wanted)
        for (const bool recompute : {false, true})
          check_same_as_parts(context, dtype, layout, wanted, recompute);
}

TEST_CASE("gelu_mlp: bit-identical to its parts on a device") {
  const auto fibers = Context::create({.device = {DeviceType::CUDA, 0}, .plugin = fiber_plugin()});
  for (const DType dtype : {DType::F32, DType::BF16})
    for (const unsigned wanted : {31U, 14U})
      check_same_as_parts(fibers, dtype, WeightLayout::InOut, wanted, wanted == 31);
}

TEST_CASE("gelu_mlp: bf16 matches f32") {
  const auto context = Context::create();
  for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut})
    CHECK(compare_bf16([&](const auto& t) { return joined_mlp(t, layout); },
                       mlp_inputs(context, {{5, 33}, 65, 17}, layout, DType::BF16, 0), 0.02) == "");
}

TEST_CASE("gelu_mlp: uses no more memory than its parts") {
  struct Memory {
    std::int64_t no_grad_peak, kept, peak, left;
  };
  const auto memory = [](Mlp mlp, unsigned wanted) {
    const auto context = Context::create();
    const auto inputs =
        mlp_inputs(context, {{512, 16}, 64, 16}, WeightLayout::InOut, DType::F32, wanted);
    MemoryLedger& ledger = context->ledger();
    const auto activations = [&] { return ledger.usage(MemoryCategory::Activations); };
    const std::int64_t before = activations().current;
    Memory result{};
    {
      const NoGradGuard off(*context);
      (void)mlp(inputs, WeightLayout::InOut);
      result.no_grad_peak = activations().peak - before;
    }
    ledger.reset_peaks();
    {
      const Tensor y = mlp(inputs, WeightLayout::InOut);
      result.kept = activations().current - before;
      autograd::backward(y, Tensor::full(context, y.shape(), y.dtype(), 1.0));
      result.peak = activations().peak - before;
    }
    for (Tensor input : inputs) input.set_grad_buffer({});
    result.left = activations().current - before;
    return result;
  };
  constexpr std::int64_t kNarrow = 512 * 16 * 4, kWide = 512 * 64 * 4;
  for (const unsigned wanted : {31U, 30U, 1U, 2U, 4U}) {
    CAPTURE(wanted);
    const Memory joined = memory(joined_mlp, wanted), parts = memory(separate_mlp, wanted);
    CHECK(joined.no_grad_peak == kWide + kNarrow);
    CHECK(joined.no_grad_peak <= parts.no_grad_peak);
    CHECK(joined.kept == parts.kept);
    CHECK(joined.peak <= parts.peak);
    CHECK(joined.left == 0);
  }
  CHECK(memory(joined_mlp, 8).kept == kWide + kNarrow);
  CHECK(memory(joined_mlp, 16).kept == kNarrow);
  CHECK(memory(joined_mlp, 1).kept == kWide + kNarrow);
}

TEST_CASE("gelu_mlp: refuses invalid arguments") {
  const auto context = Context::create();
  const auto t = mlp_inputs(context, {{2, 3}, 5, 4}, WeightLayout::InOut, DType::F32, 0);
  const auto refuses = [&](std::size_t place, const Tensor& wrong, const char* message) {
    auto inputs = t;
    inputs[place] = wrong;
    CHECK_THROWS_WITH_AS(joined_mlp(inputs, WeightLayout::InOut), doctest::Contains(message),
                         InvalidArgument);
  };
  CHECK(joined_mlp(t, WeightLayout::InOut).shape() == Shape{2, 4});
  refuses(0, random_tensor(context, {2, 4}, DType::F32, 1),
          "gelu_mlp: the last dim of x must be 3, as fc_weight is [3, 5] ([in, out]); got x of "
          "shape [2, 4]");
  refuses(1, t[2], "gelu_mlp: fc_weight must be [in, out], got shape [5]");
  refuses(2, t[4], "gelu_mlp: fc_bias must have shape [5], got [4]");
  refuses(3, random_tensor(context, {3, 4}, DType::F32, 1),
          "gelu_mlp: fc_weight [3, 5] gives 5 values, proj_weight [3, 4] takes 3");
  refuses(3, convert(t[3], DType::BF16), "gelu_mlp: proj_weight must have dtype f32");
  refuses(4, t[2], "gelu_mlp: proj_bias must have shape [4], got [5]");
}

}  // namespace
}  // namespace tessera::test
