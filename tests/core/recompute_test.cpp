#include <doctest/doctest.h>

#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/base/rng.h"
#include "core/ops/activation.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "core/ops/unary.h"
#include "core/ops/view.h"
#include "kernels/elementwise.h"
#include "tests/support/gradcheck.h"
#include "tests/support/recorded.h"

namespace tessera::test {
namespace {

// A block with dropout and a residual connection, with its weights and input gradients.
struct Block {
  explicit Block(const std::shared_ptr<Context>& context, DType dtype = DType::F32)
      : weight(random_tensor(context, {8, 8}, dtype, 1, 0.5)),
        bias(random_tensor(context, {8}, dtype, 2)),
        norm_weight(random_tensor(context, {8}, dtype, 3)),
        norm_bias(random_tensor(context, {8}, dtype, 4)) {
    for (Tensor* t : {&weight, &bias, &norm_weight, &norm_bias}) t->set_requires_grad(true);
    context->set_rng_step({.seed = 7});
  }
  Tensor operator()(const Tensor& x) const {
    ++runs;
    Tensor h = ops::layer_norm(x, norm_weight, norm_bias, 1e-5);
    h = ops::gelu(ops::linear(h, weight, bias));
    return ops::add(x, ops::dropout(h, 0.4F, layer));
  }
  Tensor weight, bias, norm_weight, norm_bias;
  std::uint64_t layer = 0;
  mutable int runs = 0;
};

struct Outcome {
  std::vector<double> y, grad_x, grad_weight, grad_norm;
  bool operator==(const Outcome&) const = default;
};

Outcome run(DType dtype, bool recomputes, bool leaf_input) {
  const auto context = Context::create();
  Block block(context, dtype);
  Tensor source = random_tensor(context, {4, 8}, dtype, 5).set_requires_grad(true);
  const Tensor x = leaf_input ? source : recorded(source);
  const auto apply = [&](const Tensor& in) {
    return recomputes ? recompute(std::cref(block), in) : block(in);
  };
  const Tensor y = apply(apply(x));
  CHECK(block.runs == 2);
  const Tensor with_side = ops::add(y, x);  // a second user of x, so that its gradient accumulates
  autograd::backward(with_side, random_tensor(context, {4, 8}, dtype, 6));
  CHECK(block.runs == (recomputes ? 4 : 2));
  return {values_of(y), values_of(source.grad()), values_of(block.weight.grad()),
          values_of(block.norm_weight.grad())};
}

TEST_CASE("recomputation changes no bit") {
  for (const DType dtype : {DType::F64, DType::F32, DType::BF16}) {
    CAPTURE(dtype_name(dtype));
    CHECK(run(dtype, true, false) == run(dtype, false, false));
  }
  CHECK(run(DType::F32, true, true) == run(DType::F32, false, true));
}

TEST_CASE("recompute of several inputs, one of them used twice and one without gradient") {
  const auto context = Context::create();
  Tensor a = random_tensor(context, {3, 8}, DType::F64, 5).set_requires_grad(true);
  Tensor b = random_tensor(context, {3, 8}, DType::F64, 6).set_requires_grad(true);
  const Tensor constant = random_tensor(context, {3, 8}, DType::F64, 7);
  const auto function = [](std::span<const Tensor> in) {
    return ops::add(ops::gelu(ops::add(in[0], in[1])), ops::add(in[2], ops::gelu(in[3])));
  };
  CHECK(gradcheck(
            [&](const std::vector<Tensor>& in) {
              return autograd::recompute(function, {in[0], in[1], in[0], constant});
            },
            {a, b}) == "");
  CHECK_THROWS_AS(autograd::recompute(function, {}), InvalidArgument);
}

TEST_CASE("recompute of several results: any of them may be used, and one may hold integers") {
  const auto context = Context::create();
  Tensor a = random_tensor(context, {3, 8}, DType::F64, 5).set_requires_grad(true);
  Tensor b = random_tensor(context, {3, 8}, DType::F64, 6).set_requires_grad(true);
  const Tensor places = Tensor::from(context, {2, 0}, DType::I32);
  const auto function = [&](std::span<const Tensor> in) {
    const Tensor h = ops::gelu(in[0]);
    return std::vector<Tensor>{h, places, Tensor(), ops::add(h, in[1]), in[1]};
  };
  // Bits choose which of results 0, 3 and 4 are used.
  for (const int used : {0b001, 0b010, 0b100, 0b011, 0b111}) {
    CAPTURE(used);
    CHECK(gradcheck(
              [&](const std::vector<Tensor>& in) {
                const auto y = autograd::recompute(function, in);
                CHECK(y[1].to_vector<std::int32_t>() == places.to_vector<std::int32_t>());
                CHECK(!y[2].defined());
                Tensor sum = ops::add(ops::mul(in[0], in[1]), in[1]);
                if ((used & 0b001) != 0) sum = ops::add(sum, ops::mul(y[0], y[0]));
                if ((used & 0b010) != 0) sum = ops::add(sum, ops::mul(y[3], in[0]));
                if ((used & 0b100) != 0) sum = ops::add(sum, y[4]);
                return sum;
              },
              {a, b}) == "");
  }
}

TEST_CASE("recompute passes the gradient check") {
  const auto context = Context::create();
  Block block(context, DType::F64);
  Tensor x = random_tensor(context, {3, 8}, DType::F64, 5).set_requires_grad(true);
  CHECK(gradcheck(
            [&](const std::vector<Tensor>& in) {
              return recompute([&](const Tensor& h) { return block(h); }, in[0]);
            },
            {x, block.weight, block.bias}) == "");
}

TEST_CASE("running again leaves out the last product, unless something reads it") {
  // Operations of matrix products, in units of one forward product.
  const auto products = [](const std::function<Tensor(const Tensor&)>& function) {
    const auto context = Context::create({.device = {DeviceType::Meta, 0}});
    Tensor x = Tensor::empty(context, {16, 8}, DType::F32).set_requires_grad(true);
    const Tensor y = recompute(function, x);
    context->ledger().reset_peaks();
    const double before = context->planned_flops();
    autograd::backward(y, Tensor::empty(context, y.shape(), y.dtype()));
    return (context->planned_flops() - before) / (2.0 * 16 * 8 * 8);
  };
  const auto linear = [](const Tensor& x) {
    Tensor weight = Tensor::empty(x.context(), {8, 8}, x.dtype()).set_requires_grad(true);
    return ops::linear(x, weight, {});
  };
  CHECK(products(linear) == 2);
  CHECK(products([&](const Tensor& x) { return linear(ops::gelu(linear(x))); }) == 4 + 1);
  CHECK(products([&](const Tensor& x) { return ops::gelu(linear(x)); }) == 2 + 1);
  CHECK(products([&](const Tensor& x) { return ops::add(x, ops::dropout(linear(x), 0.5F, 0)); }) ==
        2);
  CHECK(products([&](const Tensor& x) { return ops::reshape(linear(x), {8, 16}); }) == 2);
  CHECK(products([&](const Tensor& x) { return recompute(linear, recompute(linear, x)); }) ==
        4 + 1);
}

TEST_CASE("late results that others need change no bit") {
  using Function = std::function<std::vector<Tensor>(std::span<const Tensor>)>;
  const auto context = Context::create();
  const Block block(context);
  const auto linear = [&](const Tensor& x) { return ops::linear(x, block.weight, block.bias); };
  const auto drop = [](const Tensor& x) { return ops::dropout(x, 0.4F, 7); };
  const std::vector<Function> functions = {
      [&](auto in) -> std::vector<Tensor> {  // the input of another late result, and a result
        const Tensor h = linear(in[0]);
        return {h, linear(h)};
      },
      [&](auto in) -> std::vector<Tensor> {
        const Tensor h = linear(in[0]);
        return {ops::reshape(h, {8, 4}), linear(h), ops::mul(h, h)};
      },
      [&](auto in) -> std::vector<Tensor> {
        const Tensor h = linear(in[0]), dropped = drop(h);
        return {dropped, ops::add(h, linear(ops::gelu(dropped)))};
      },
      [&](auto in) -> std::vector<Tensor> {  // read at the end of a long chain
        Tensor sum = linear(in[0]);
        for (int i = 0; i < 5; ++i) sum = ops::add(drop(linear(sum)), sum);
        return {ops::gelu(sum), sum};
      },
      [&](auto in) -> std::vector<Tensor> {  // within another recomputed function
        return {recompute(linear, ops::add(in[0], recompute(linear, in[0])))};
      },
      [&](auto in) -> std::vector<Tensor> {
        return {ops::linear(in[0], block.weight, {}, ops::WeightLayout::OutIn,
                            {{linear(in[0]), block.weight, 0}}, linear(in[0]))};
      }};
  for (std::size_t i = 0; i < functions.size(); ++i) {
    CAPTURE(i);
    const auto outcome = [&](bool recomputes) {
      Tensor x = random_tensor(context, {4, 8}, DType::F32, 5).set_requires_grad(true);
      Tensor weight = block.weight, bias = block.bias;
      weight.zero_grad(), bias.zero_grad();
      const std::vector<Tensor> in{recorded(x)};
      const auto y = recomputes ? autograd::recompute(functions[i], in) : functions[i](in);
      Tensor sum = ops::reshape(y[0], {4, 8});
      for (std::size_t j = 1; j < y.size(); ++j) sum = ops::add(sum, y[j]);
      autograd::backward(sum, random_tensor(context, {4, 8}, DType::F32, 6));
      return std::vector{values_of(sum), values_of(x.grad()), values_of(weight.grad()),
                         values_of(bias.grad())};
    };
    CHECK(outcome(true) == outcome(false));
  }
}

TEST_CASE("a late result takes no more memory than one at once, and fails as one does") {
  const auto context = Context::create();
  const auto peak = [&](int additions) {
    const Block block(context);
    Tensor x = random_tensor(context, {64, 8}, DType::F32, 5).set_requires_grad(true);
    const auto function = [&](const Tensor& in) {
      Tensor sum = ops::linear(in, block.weight, {});
      for (int i = 0; i < additions; ++i) sum = ops::add(sum, in);
      return ops::gelu(sum);
    };
    const Tensor y = recompute(function, x);
    context->ledger().reset_peaks();
    autograd::backward(y, Tensor::full(context, y.shape(), y.dtype(), 1.0));
    return context->ledger().total().peak / static_cast<std::int64_t>(y.bytes());
  };
  CHECK(peak(40) <= peak(2) + 1);

  // A change in place between an operation and the first reader of its result.
  Tensor x = random_tensor(context, {4, 8}, DType::F32, 5).set_requires_grad(true);
  const Tensor changed = random_tensor(context, {8, 8}, DType::F32, 6);
  const Tensor y = recompute(
      [&](const Tensor& in) {
        const Tensor h = ops::linear(in, changed, {});
        changed.storage()->bump_version();
        return ops::mul(h, h);
      },
      x);
  CHECK_THROWS_WITH_AS(autograd::backward(y, Tensor::full(context, y.shape(), y.dtype(), 1.0)),
                       doctest::Contains("linear: a tensor of shape [8, 8]"), InvalidArgument);
}

TEST_CASE("cheap results that are computed again change no bit, and take no memory until then") {
  for (const DType dtype : {DType::F64, DType::F32, DType::BF16}) {
    CAPTURE(dtype_name(dtype));
    const auto run = [dtype](bool again, bool changes) {
      const auto context = Context::create();
      std::vector<std::weak_ptr<Storage>> list;
      context->set_cheap_results(again ? &list : nullptr);
      Block block(context, dtype);
      const auto linear = [&](const Tensor& x) { return ops::linear(x, block.weight, block.bias); };
      Tensor x = random_tensor(context, {64, 8}, dtype, 5).set_requires_grad(true);
      const std::int64_t before = context->ledger().total().current;
      Tensor y = linear(ops::layer_norm(x, block.norm_weight, block.norm_bias, 1e-5));
      y = ops::add_rms_norm(y, x, block.norm_weight, 1e-5).y;
      if (changes) kernels::fill(*context, y.view(), 0.5), y.storage()->bump_version();
      y = linear(y);
      y = linear(ops::gelu(y));
      const Tensor h = ops::relu(y);
      y = ops::gelu_mlp(ops::mul(h, h), block.weight, block.bias, block.weight, block.bias);
      y = linear(ops::reshape(ops::swiglu(ops::reshape(y, {32, 16})), {32, 8}));
      const std::int64_t kept =
          2 * (context->ledger().total().current - before) / static_cast<std::int64_t>(x.bytes());
      autograd::backward(y, random_tensor(context, {32, 8}, dtype, 6));
      return std::tuple(kept, values_of(y), values_of(x.grad()), values_of(block.weight.grad()),
                        values_of(block.norm_weight.grad()));
    };
    for (const bool changes : {false, true}) {
      CAPTURE(changes);
      auto all = run(false, changes), again = run(true, changes);
      // Results of both norms (unless changed), gelu, h * h, GELU of gelu_mlp, and swiglu's of half the size.
      CHECK(std::get<0>(all) - std::get<0>(again) == (changes ? 9 : 11));
      std::get<0>(all) = std::get<0>(again);
      CHECK(all == again);
    }
  }
}

TEST_CASE("a cheap result that is changed after it was saved has its former contents in backward") {
  const auto gradient = [](bool changes) {
    const auto context = Context::create();
    std::vector<std::weak_ptr<Storage>> list;
    context->set_cheap_results(&list);
    Tensor x = random_tensor(context, {4, 8}, DType::F32, 5).set_requires_grad(true);
    const Tensor h = ops::gelu(x), y = ops::mul(h, h);
    CHECK(list.size() == 2);
    if (changes) kernels::fill(*context, h.view(), 0.5), h.storage()->bump_version();
    autograd::backward(y, random_tensor(context, {4, 8}, DType::F32, 6));
    return values_of(x.grad());
  };
  CHECK(gradient(true) == gradient(false));
}

TEST_CASE("a leaf made of a cheap result stays where it is, and long chains keep some results") {
  const auto context = Context::create();
  std::vector<std::weak_ptr<Storage>> list;
  context->set_cheap_results(&list);
  Tensor x = random_tensor(context, {4, 8}, DType::F32, 5).set_requires_grad(true);
  const Tensor h = ops::gelu(x);
  Tensor leaf = h.detach().set_requires_grad(true);
  const Tensor y = ops::mul(leaf, leaf);
  CHECK(leaf.storage() == h.storage());
  Tensor end = x;
  for (int i = 0; i < 9; ++i) end = ops::gelu(end);
  CHECK(end.storage()->saved_as() != nullptr);
  CHECK(list.size() < 2 + 9);
}

TEST_CASE("recompute saves only the block's input") {
  const auto context = Context::create();
  const Block block(context);
  const Tensor x = random_tensor(context, {64, 8}, DType::F32, 5);
  const std::int64_t before = context->ledger().total().current;
  const Tensor y = recompute(std::cref(block), x);
  CHECK(context->ledger().total().current - before == static_cast<std::int64_t>(y.bytes()));
  const Tensor kept = block(x);
  CHECK(context->ledger().total().current - before > static_cast<std::int64_t>(4 * y.bytes()));
}

TEST_CASE("recompute is recorded for the block's weights even if x needs no gradient") {
  const auto context = Context::create();
  const Block block(context);
  const Tensor x = random_tensor(context, {4, 8}, DType::F32, 5);
  const Tensor y = recompute(std::cref(block), x);
  CHECK(y.requires_grad());
  autograd::backward(y, random_tensor(context, {4, 8}, DType::F32, 6));
  CHECK(block.weight.grad().defined());
  CHECK_FALSE(x.grad().defined());

  const NoGradGuard off(*context);
  CHECK_FALSE(recompute(std::cref(block), x).requires_grad());
}

TEST_CASE("blocks that return x, or do not depend on it") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {2}, DType::F64, 1).set_requires_grad(true);
  const Tensor seed = random_tensor(context, {2}, DType::F64, 2);
  const Tensor same = recompute([](const Tensor& in) { return in; }, x);
  CHECK(same.impl() != x.impl());
  autograd::backward(same, seed);
  CHECK(values_of(x.grad()) == values_of(seed));

  x.zero_grad();
  const Tensor constant = random_tensor(context, {2}, DType::F64, 3);
  autograd::backward(recompute([&](const Tensor&) { return Tensor(constant); }, x), seed);
  CHECK(values_of(x.grad()) == std::vector<double>{0, 0});
}

TEST_CASE("nested recompute runs each operation backward once, in order") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {2}, DType::F64, 1).set_requires_grad(true);
  std::vector<std::string> calls;
  const auto inner = [&](const Tensor& in) {
    return ops::gelu(recorded(in, [&] { calls.emplace_back("inner"); }));
  };
  const auto outer = [&](const Tensor& in) {
    const Tensor h = recorded(in, [&] { calls.emplace_back("outer"); });
    return ops::add(recompute(inner, h), h);
  };
  const Tensor seed = random_tensor(context, {2}, DType::F64, 2);
  autograd::backward(recompute(outer, x), seed);
  CHECK(calls == std::vector<std::string>{"inner", "outer"});
  const std::vector<double> found = values_of(x.grad());
  x.zero_grad();
  autograd::backward(ops::add(ops::gelu(x), x), seed);
  CHECK(values_of(x.grad()) == found);
}

TEST_CASE("recompute refuses invalid blocks") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {2}, DType::F64, 1).set_requires_grad(true);
  const Tensor seed = random_tensor(context, {2}, DType::F64, 2);

  const Tensor outside = ops::gelu(x);
  const Tensor hidden = recompute([&](const Tensor& in) { return ops::add(in, outside); }, x);
  CHECK_THROWS_WITH_AS(autograd::backward(hidden, seed),
                       doctest::Contains("uses the result of gelu (shape [2])"), InvalidArgument);

  int calls = 0;
  const Tensor fickle = recompute(
      [&](const Tensor& in) {
        return calls++ == 0 ? in : random_tensor(context, {3}, DType::F64, 1);
      },
      x);
  CHECK_THROWS_WITH_AS(autograd::backward(fickle, seed),
                       doctest::Contains("gave [2] f64 in forward and [3] f64 when run again"),
                       InvalidArgument);

  const Tensor kept = recompute([](const Tensor& in) { return ops::gelu(in); }, x);
  x.storage()->bump_version();
  CHECK_THROWS_WITH_AS(autograd::backward(kept, seed), doctest::Contains("changed in place"),
                       InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
