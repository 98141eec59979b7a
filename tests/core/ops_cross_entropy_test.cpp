#include <doctest/doctest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/ops/activation.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

Tensor targets_of(const std::shared_ptr<Context>& context,
                  const std::vector<std::int32_t>& values) {
  return Tensor::from<std::int32_t>(context, {static_cast<std::int64_t>(values.size())}, values);
}

double reference(const Tensor& x, const Tensor& weight, const std::vector<std::int32_t>& targets,
                 double scale) {
  const std::vector<double> a = values_of(x), w = values_of(weight);
  const auto channels = static_cast<std::size_t>(x.dim(1));
  const auto vocab = static_cast<std::size_t>(weight.dim(0));
  double loss = 0.0;
  for (std::size_t r = 0; r < targets.size(); ++r) {
    if (targets[r] < 0) continue;
    std::vector<double> logits(vocab);
    double sum = 0.0;
    for (std::size_t v = 0; v < vocab; ++v) {
      for (std::size_t c = 0; c < channels; ++c)
        logits[v] += a[r * channels + c] * w[v * channels + c];
      sum += std::exp(logits[v]);
    }
    loss += std::log(sum) - logits[static_cast<std::size_t>(targets[r])];
  }
  return scale * loss;
}

const std::vector<std::int32_t> kTargets{3, 0, -1, 10, 3, 7, -1};

struct Inputs {
  explicit Inputs(DType dtype) {
    x = random_tensor(context, {7, 5}, dtype, 1).set_requires_grad(true);
    weight = random_tensor(context, {11, 5}, dtype, 2).set_requires_grad(true);
    targets = targets_of(context, kTargets);
  }
  std::shared_ptr<Context> context = Context::create();
  Tensor x, weight, targets;
};

TEST_CASE("cross_entropy: matches its definition and takes any incoming gradient") {
  const auto context = Context::create();
  Tensor logits = random_tensor(context, {7, 11}, DType::F64, 1).set_requires_grad(true);
  const Tensor targets = targets_of(context, kTargets);
  const Tensor identity = [&] {
    std::vector<double> ones(121);
    for (std::size_t i = 0; i < 11; ++i) ones[i * 12] = 1;
    return Tensor::from<double>(context, {11, 11}, ones);
  }();
  const double expected = reference(logits, identity, kTargets, 0.25);
  const Tensor loss = ops::cross_entropy(logits, targets, 0.25);
  CHECK(loss.shape() == Shape{1});
  CHECK(loss.item() == doctest::Approx(expected).epsilon(1e-12));
  CHECK(ops::cross_entropy(logits, targets_of(context, std::vector<std::int32_t>(7, -1))).item() ==
        0.0);

  const auto alone = [&](const std::vector<Tensor>& t) {
    return ops::cross_entropy(t[0], targets, 0.25);
  };
  CHECK(gradcheck(alone, {logits}) == "");
  const auto weighted = [&](const std::vector<Tensor>& t) {
    const Tensor first = ops::cross_entropy(t[0], targets, 0.25);
    return first * first - 3 * ops::cross_entropy(2 * t[0], targets);
  };
  CHECK(gradcheck(weighted, {logits}) == "");
  CHECK(compare_bf16(alone, {convert(logits, DType::BF16)}, 0.02) == "");
  // The default seed of backward takes another path.
  logits.zero_grad();
  autograd::backward(alone({logits}));
  const std::vector<double> by_default = values_of(logits.grad());
  logits.zero_grad();
  autograd::backward(alone({logits}), Tensor::full(context, {1}, DType::F64, 1.0));
  CHECK(values_of(logits.grad()) == by_default);
}

TEST_CASE("cross_entropy: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor logits = random_tensor(context, {2, 3}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(
      ops::cross_entropy(logits, targets_of(context, {0, 3})),
      "cross_entropy: target 3 at row 1 is outside of the vocabulary of 3; -1 marks "
      "a row to ignore",
      InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::cross_entropy(logits, targets_of(context, {0})),
                       "cross_entropy: targets must have shape [2], got [1]", InvalidArgument);
  CHECK_THROWS_AS(ops::cross_entropy(logits, targets_of(context, {0, 1}), NAN), InvalidArgument);
  CHECK_THROWS_AS(
      ops::cross_entropy(Tensor::empty(context, {2, 0}, DType::F32), targets_of(context, {0, 1})),
      InvalidArgument);
  CHECK_THROWS_AS(
      ops::cross_entropy(Tensor::empty(context, {6}, DType::F32), targets_of(context, {0, 1})),
      InvalidArgument);
}

TEST_CASE("linear_cross_entropy: matches its definition, with ignored rows, for any chunk size") {
  const Inputs in(DType::F64);
  const NoGradGuard off(*in.context);
  const double expected = reference(in.x, in.weight, kTargets, 0.25);
  for (const std::int64_t chunk : {0, 1, 2, 3, 7, 100})
    CHECK(ops::linear_cross_entropy(in.x, in.weight, in.targets, 0.25, chunk).item() ==
          doctest::Approx(expected).epsilon(1e-9));
}

TEST_CASE("linear_cross_entropy: gradients for any chunk size") {
  const Inputs in(DType::F64);
  for (const std::int64_t chunk : {0, 1, 3, 7}) {
    CAPTURE(chunk);
    const auto f = [&](const std::vector<Tensor>& t) {
      return ops::linear_cross_entropy(t[0], t[1], in.targets, 0.5, chunk);
    };
    const auto capped = [&](const std::vector<Tensor>& t) {
      return ops::linear_cross_entropy(t[0], t[1], in.targets, 0.5, chunk, 2.0);
    };
    CHECK(gradcheck(capped, {in.x, in.weight}, {.leaves_only = true}) == "");
    CHECK(gradcheck(f, {in.x, in.weight}, {.leaves_only = true}) == "");
    CHECK(gradcheck(f, {in.x.detach(), in.weight}, {.leaves_only = true}) == "");
    CHECK(gradcheck(f, {in.x, in.weight.detach()}) == "");  // x as a non-leaf
  }
}

TEST_CASE("linear_cross_entropy: recording changes neither loss nor gradients") {
  const Inputs in(DType::F32);
  double evaluated = 0.0;
  {
    const NoGradGuard off(*in.context);
    evaluated = ops::linear_cross_entropy(in.x, in.weight, in.targets, 1.0).item();
  }
  CHECK_FALSE(in.weight.grad().defined());
  const Tensor loss = ops::linear_cross_entropy(in.x, in.weight, in.targets, 1.0);
  CHECK(loss.item() == evaluated);
  CHECK(loss.requires_grad());
  CHECK(in.weight.grad().defined());  // computed in forward
  CHECK_FALSE(in.x.grad().defined());
  const std::vector<double> grad_weight = values_of(in.weight.grad());
  autograd::backward(loss);
  CHECK(in.x.grad().defined());
  CHECK(values_of(in.weight.grad()) == grad_weight);
}

TEST_CASE("linear_cross_entropy: a weight tied to the embedding accumulates both gradients") {
  Inputs in(DType::F64);
  const Tensor more = random_tensor(in.context, {7, 5}, DType::F64, 9).set_requires_grad(true);
  const auto grad_of = [&](const Tensor& x) {
    in.weight.zero_grad();
    autograd::backward(ops::linear_cross_entropy(x, in.weight, in.targets, 1.0));
    return values_of(in.weight.grad());
  };
  const std::vector<double> one = grad_of(in.x), other = grad_of(more);
  autograd::backward(ops::linear_cross_entropy(in.x, in.weight, in.targets, 1.0));
  const std::vector<double> both = values_of(in.weight.grad());
  for (std::size_t i = 0; i < both.size(); ++i)
    CHECK(both[i] == doctest::Approx(one[i] + other[i]).epsilon(1e-12));
}

TEST_CASE("linear_cross_entropy: a gradient buffer of another dtype") {
  Inputs in(DType::BF16);
  autograd::backward(ops::linear_cross_entropy(in.x, in.weight, in.targets, 1.0, 2));
  CHECK(in.weight.grad().dtype() == DType::F32);
  const std::vector<double> expected = values_of(in.weight.grad());
  const Tensor buffer = Tensor::full(in.context, {11, 5}, DType::F64, 5.0);
  in.weight.set_grad_buffer(buffer);
  for (int pass = 1; pass <= 2; ++pass) {
    autograd::backward(ops::linear_cross_entropy(in.x, in.weight, in.targets, 1.0, 2));
    for (std::size_t i = 0; i < expected.size(); ++i)
      CHECK(buffer.data<double>()[i] == doctest::Approx(pass * expected[i]).epsilon(1e-6));
  }
}

TEST_CASE("linear_cross_entropy: bf16 matches f32, and its loss is f32") {
  const Inputs in(DType::BF16);
  const auto f = [&](const std::vector<Tensor>& t) {
    return ops::linear_cross_entropy(t[0], t[1], in.targets, 1.0, 3);
  };
  CHECK(compare_bf16(f, {in.x.detach(), in.weight.detach()}, 0.02) == "");
  CHECK(f({in.x, in.weight}).dtype() == DType::F32);
}

TEST_CASE("linear_cross_entropy: only ignored rows") {
  Inputs in(DType::F32);
  const Tensor none = targets_of(in.context, std::vector<std::int32_t>(7, -1));
  const Tensor loss = ops::linear_cross_entropy(in.x, in.weight, none, 1.0);
  autograd::backward(loss);
  CHECK(loss.item() == 0.0);
  CHECK(values_of(in.x.grad()) == std::vector<double>(35, 0.0));
  CHECK(values_of(in.weight.grad()) == std::vector<double>(55, 0.0));
}

TEST_CASE("linear_cross_entropy: logits above 64 MiB never exist at once") {
  Device planned{};
  SUBCASE("on the CPU") {}
  SUBCASE("on a GPU") { planned = {DeviceType::CUDA, 0}; }
  const bool on_gpu = planned.type == DeviceType::CUDA;
  const auto context = Context::create({.device = {DeviceType::Meta, 0}, .planned = planned});
  const Tensor head = Tensor::empty(context, {50257, 8}, DType::BF16, MemoryCategory::Parameters);
  const auto peak = [&](std::int64_t rows) {
    const Tensor x = Tensor::empty(context, {rows, 8}, DType::BF16, MemoryCategory::Data);
    const Tensor ids = Tensor::empty(context, {rows}, DType::I32, MemoryCategory::Data);
    context->ledger().reset_peaks();
    CHECK(ops::linear_cross_entropy(x, head, ids, 1.0).shape() == Shape{1});
    CHECK(context->ledger().usage(MemoryCategory::Workspace).current == 0);
    return context->ledger().usage(MemoryCategory::Workspace).peak;
  };
  // A GPU's logits have the dtype of x, and it pads the weight.
  const std::int64_t row = 50304 * (on_gpu ? 2 : 4), rest = 2 * row + (on_gpu ? 50304 * 8 * 2 : 0);
  const std::int64_t times = on_gpu ? 2 : 1;
  const auto is_near = [&](std::int64_t rows, std::int64_t at_once) {
    const std::int64_t bytes = peak(times * rows);
    CHECK(bytes >= times * at_once * row);
    CHECK(bytes <= times * at_once * row + rest);
  };
  is_near(300, 300);
  is_near(400, 200);
  is_near(1200, on_gpu ? 600 : 300);  // 64 MiB at most on a CPU
  if (on_gpu) is_near(1400, 350);
}

TEST_CASE("linear_cross_entropy: refuses invalid arguments before writing any gradient") {
  Inputs in(DType::F32);
  for (const std::int32_t bad : {-2, 11}) {
    std::vector<std::int32_t> targets = kTargets;
    targets[5] = bad;
    CHECK_THROWS_WITH_AS(
        ops::linear_cross_entropy(in.x, in.weight, targets_of(in.context, targets), 1.0, 2),
        doctest::Contains(
            fmt::format("target {} at row 5 is outside of the vocabulary of 11", bad).c_str()),
        InvalidArgument);
  }
  CHECK_FALSE(in.weight.grad().defined());
  const auto call = [&](const Tensor& x, const Tensor& w, const Tensor& t, double scale = 1.0,
                        std::int64_t chunk = 0) {
    return ops::linear_cross_entropy(x, w, t, scale, chunk);
  };
  CHECK_THROWS_WITH_AS(call(in.x, in.weight, targets_of(in.context, {1})),
                       doctest::Contains("targets must have shape [7], got [1]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(call(in.x, in.x, in.targets, NAN), doctest::Contains("finite, got nan"),
                       InvalidArgument);
  CHECK_THROWS_AS(call(in.x, in.weight, in.targets, 1.0, -1), InvalidArgument);
  CHECK_THROWS_WITH_AS(call(in.x, random_tensor(in.context, {11, 4}, DType::F32, 2), in.targets),
                       doctest::Contains("weight must have shape [11, 5], got [11, 4]"),
                       InvalidArgument);
  CHECK_THROWS_AS(call(Tensor::empty(in.context, {0, 5}, DType::F32), in.weight,
                       Tensor::empty(in.context, {0}, DType::I32)),
                  InvalidArgument);
  CHECK_THROWS_AS(call(in.x, ops::gelu(in.weight), in.targets), InvalidArgument);

  const Tensor loss = call(in.x, in.weight, in.targets);
  CHECK_THROWS_WITH_AS(autograd::backward(loss, Tensor::full(in.context, {1}, DType::F32, 0.5)),
                       doctest::Contains("gradient of 1, got 0.5"), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
