// Mistakes of users of the library: each gives a sentence that says what to do.
#include <doctest/doctest.h>

#include <array>

#include "core/autograd/autograd.h"
#include "core/nn/layers.h"
#include "core/ops/elementwise.h"
#include "core/ops/matmul.h"
#include "core/ops/reduction.h"
#include "tests/support/check_throws.h"

namespace tessera {
namespace {

TEST_CASE("operands that do not fit") {
  const auto context = Context::create(), other = Context::create();
  const Tensor a = Tensor::full(context, {2, 3}, DType::F32, 1.0);
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "matmul: a and b must be [..., M, K] and [..., K, N], got shapes [2, 3] and "
                       "[2, 3]",
                       ops::matmul(a, a));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "add: b must have dtype f32, got bf16; convert it with ops::cast",
                       a + Tensor::full(context, {2, 3}, DType::BF16, 1.0));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "add: tensors of different contexts (cpu and cpu); a rank makes all of its "
                       "tensors with one Context, and copies others through the host",
                       a + Tensor::full(other, {2, 3}, DType::F32, 1.0));
  CHECK_THROWS_HOLDING(InvalidArgument, "an undefined tensor was used: one that was default",
                       a + Tensor());
}

TEST_CASE("a model that has no memory") {
  const auto context = Context::create();
  nn::Module root;
  const nn::Linear layer(root, "layer", {.in = 3, .out = 2});
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "was used before it had memory: materialize() or shard its model first",
                       layer(Tensor::full(context, {2, 3}, DType::F32, 1.0)));
}

TEST_CASE("backward passes over graphs that are gone or changed") {
  const auto context = Context::create();
  Tensor x = Tensor::full(context, {2}, DType::F32, 3.0).set_requires_grad(true);
  const Tensor loss = ops::sum(x * x);
  autograd::backward(loss);
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "a second time: an earlier backward freed this part of the graph; add up "
                       "the losses, or run forward again",
                       autograd::backward(loss));
  const Tensor changed = ops::sum(x * x);
  const std::array<float, 2> values = {1, 2};
  x.copy_from_host(values.data());
  CHECK_THROWS_HOLDING(InvalidArgument, "work on a copy, or change it after backward",
                       autograd::backward(changed));
  CHECK_THROWS_HOLDING(InvalidArgument, "sum it up first", autograd::backward(x * x));
}

TEST_CASE("an operation of one's own whose backward is wrong") {
  const auto context = Context::create();
  const Tensor x = Tensor::full(context, {2, 3}, DType::F32, 3.0).set_requires_grad(true);
  const auto run = [&](const autograd::Backward& backward) {
    Tensor y = Tensor::full(context, {}, DType::F32, 1.0);
    autograd::record("mine", y, {x}, backward);
    autograd::backward(y);
  };
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "mine: its backward must give input 0 a dense gradient of the input's shape "
                       "[2, 3], got []",
                       run([](const Tensor& dy, auto& into) { into.pass(0, dy); }));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "mine: the output of a recorded operation must be a new tensor, and this "
                       "one is recorded already: compute it under NoGradGuard",
                       [&] {
                         Tensor y = x * x;
                         autograd::record("mine", y, {x}, [](const Tensor&, auto&) {});
                       }());
}

}  // namespace
}  // namespace tessera
