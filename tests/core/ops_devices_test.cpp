// Operations that models are written with, on every device: gradients on the CPU and with the CUDA
// kernels on fibers, in f64, f32 and bf16; shapes on the meta device.

#include <doctest/doctest.h>

#include "core/autograd/autograd.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/experts.h"
#include "core/ops/matmul.h"
#include "core/ops/reduction.h"
#include "core/ops/selection.h"
#include "core/ops/shape.h"
#include "core/ops/softmax.h"
#include "core/ops/unary.h"
#include "tests/support/gradcheck.h"
#include "tests/support/paths.h"

namespace tessera::test {
namespace {

using Tensors = std::vector<Tensor>;

Tensor integers(const Tensor& like, const Shape& shape, const std::vector<std::int32_t>& values) {
  return Tensor::from<std::int32_t>(like.context(), shape, values);
}

DType accumulator(const Tensor& t) { return t.dtype() == DType::F64 ? DType::F64 : DType::F32; }

// Two experts of five for each of six tokens; none for expert 3.
ops::Grouping grouped(const Tensor& like) {
  return ops::group_by_expert(integers(like, {6, 2}, {4, 0, 0, 1, 1, 4, 4, 2, 1, 0, 4, 1}), 5);
}

// t: rows [12, 3], then weights [8, 3] and [3, 4] of five experts.
Tensor run_experts(const Tensors& t, bool one_by_one) {
  const ops::Grouping grouping = grouped(t[0]);
  const Tensor hidden = Tensor::empty(t[0].context(), {12, 8}, t[0].dtype());
  Tensor y = Tensor::empty(t[0].context(), {12, 3}, t[0].dtype());
  const Tensors up(t.begin() + 1, t.begin() + 6), down(t.begin() + 6, t.end());
  if (!one_by_one) return ops::expert_mlps(t[0], grouping, 0, up, down, ops::Gate::Silu, hidden, y);
  for (std::size_t i = 0; i < 5; ++i)
    y = ops::expert_mlps(t[0], grouping, static_cast<std::int64_t>(i), {up[i]}, {down[i]},
                         ops::Gate::Silu, hidden, y);
  return y;
}

const std::vector<Shape> kExperts = {{12, 3}, {8, 3}, {8, 3}, {8, 3}, {8, 3}, {8, 3},
                                     {3, 4},  {3, 4}, {3, 4}, {3, 4}, {3, 4}};

struct Case {
  const char* name;
  std::vector<Shape> inputs;
  Shape result;
  Operation operation;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> kCases = {
      {"add", {{3, 5}, {5}}, {3, 5}, [](const Tensors& t) { return t[0] + t[1]; }},
      {"sub", {{2, 1, 3}, {4, 1}}, {2, 4, 3}, [](const Tensors& t) { return t[0] - t[1]; }},
      {"mul", {{2, 1, 3}, {4, 1}}, {2, 4, 3}, [](const Tensors& t) { return t[0] * t[1]; }},
      {"div", {{3}, {4, 1}}, {4, 3}, [](const Tensors& t) { return t[0] / (t[1] * t[1] + 1); }},
      {"numbers", {{7}}, {7}, [](const Tensors& t) { return 2 - 3 / (t[0] * t[0] + 1.5) / 4; }},
      {"sigmoid", {{33}}, {33}, [](const Tensors& t) { return ops::sigmoid(t[0]); }},
      {"silu", {{33}}, {33}, [](const Tensors& t) { return ops::silu(t[0]); }},
      {"tanh", {{33}}, {33}, [](const Tensors& t) { return ops::tanh(t[0]); }},
      {"relu", {{33}}, {33}, [](const Tensors& t) { return ops::relu(t[0]); }},
      {"exp", {{33}}, {33}, [](const Tensors& t) { return ops::exp(t[0]); }},
      {"log", {{33}}, {33}, [](const Tensors& t) { return ops::log(t[0] * t[0] + 1); }},
      {"sqrt", {{33}}, {33}, [](const Tensors& t) { return ops::sqrt(t[0] * t[0] + 1); }},
      {"sum", {{3, 5}}, {}, [](const Tensors& t) { return ops::sum(t[0]); }},
      {"sum of dim 0", {{3, 5}}, {5}, [](const Tensors& t) { return ops::sum(t[0], 0); }},
      {"sum of dim 1",
       {{2, 5, 3}},
       {2, 1, 3},
       [](const Tensors& t) { return ops::sum(t[0], 1, true); }},
      {"mean", {{3, 5}}, {}, [](const Tensors& t) { return ops::mean(t[0]); }},
      {"mean of the last dim", {{3, 5}}, {3}, [](const Tensors& t) { return ops::mean(t[0], -1); }},
      {"max", {{3, 5}}, {}, [](const Tensors& t) { return ops::max(t[0]); }},
      {"max of dim 1", {{2, 5, 3}}, {2, 3}, [](const Tensors& t) { return ops::max(t[0], 1); }},
      {"softmax", {{4, 33}}, {4, 33}, [](const Tensors& t) { return ops::softmax(t[0]); }},
      {"log_softmax",
       {{2, 2, 7}},
       {2, 2, 7},
       [](const Tensors& t) { return ops::log_softmax(t[0]); }},
      {"matmul",
       {{3, 5}, {5, 4}},
       {3, 4},
       [](const Tensors& t) { return ops::matmul(t[0], t[1]); }},
      {"matmul of batches",
       {{2, 3, 4, 5}, {2, 3, 5, 1}},
       {2, 3, 4, 1},
       [](const Tensors& t) { return ops::matmul(t[0], t[1]); }},
      {"matmul of a batch and a matrix",
       {{2, 3, 5}, {5, 4}},
       {2, 3, 4},
       [](const Tensors& t) { return ops::matmul(t[0], t[1]); }},
      {"matmul of a matrix and a batch",
       {{3, 5}, {2, 5, 4}},
       {2, 3, 4},
       [](const Tensors& t) { return ops::matmul(t[0], t[1]); }},
      {"matmul of broadcast batches",
       {{2, 1, 3, 5}, {4, 5, 2}},
       {2, 4, 3, 2},
       [](const Tensors& t) { return ops::matmul(t[0], t[1]); }},
      {"transpose",
       {{2, 3, 5}},
       {5, 3, 2},
       [](const Tensors& t) { return ops::transpose(t[0], 0, -1); }},
      {"broadcast_to",
       {{3, 1}},
       {2, 3, 4},
       [](const Tensors& t) {
         return ops::broadcast_to(t[0], {2, 3, 4});
       }},
      {"slice", {{2, 5, 3}}, {2, 2, 3}, [](const Tensors& t) { return ops::slice(t[0], 1, 2, 4); }},
      {"split",
       {{5, 3}},
       {2, 3},
       [](const Tensors& t) {
         const Tensors parts = ops::split(t[0], {2, 1, 2}, 0);
         return parts[0] * parts[2] + parts[1];
       }},
      {"concat",
       {{2, 3}, {2, 1}},
       {2, 7},
       [](const Tensors& t) {
         return ops::concat({t[0], t[1], t[0]}, 1);
       }},
      {"gather",
       {{3, 4}},
       {3, 5},
       [](const Tensors& t) {
         return ops::gather(t[0], 1,
                            integers(t[0], {3, 5}, {0, 1, 1, 1, 3, 3, 3, 3, 2, 0, 0, 2, 2, 1, 1}));
       }},
      {"gather of part of a tensor",
       {{3, 4, 2}},
       {2, 3, 2},
       [](const Tensors& t) {
         return ops::gather(t[0], 1,
                            integers(t[0], {2, 3, 2}, {0, 1, 1, 1, 3, 3, 3, 3, 2, 0, 0, 2}));
       }},
      {"where",
       {{2, 3}, {3}},
       {4, 2, 3},
       [](const Tensors& t) {
         return ops::where(integers(t[0], {4, 1, 1}, {0, 1, -7, 0}), t[0], t[1]);
       }},
      {"masked_fill",
       {{2, 3}},
       {2, 3},
       [](const Tensors& t) {
         return ops::masked_fill(t[0], integers(t[0], {3}, {0, 1, 0}), -2.5);
       }},
      {"cross_entropy",
       {{4, 7}},
       {1},
       [](const Tensors& t) {
         return ops::cross_entropy(t[0], integers(t[0], {4}, {6, -1, 0, 3}), 0.25);
       }},
      {"rows of chosen experts",
       {{6, 9}, {6, 7}},
       {6, 9},
       [](const Tensors& t) {
         const Tensor p = ops::softmax(ops::cast(t[1], accumulator(t[1])));
         const Tensor chosen = ops::top_k(p, 3);
         const ops::Grouping grouping = ops::group_by_expert(chosen, 7);
         return ops::collect_rows(ops::spread_rows(t[0], grouping), ops::gather(p, 1, chosen),
                                  grouping);
       }},
      {"expert_mlps", kExperts, {12, 3}, [](const Tensors& t) { return run_experts(t, false); }},
      {"expert_mlps, one by one",
       kExperts,
       {12, 3},
       [](const Tensors& t) { return run_experts(t, true); }},
      {"losses are added up",
       {{4, 7}},
       {1},
       [](const Tensors& t) {
         const Tensor loss = ops::cross_entropy(t[0], integers(t[0], {4}, {6, -1, 0, 3}), 0.25);
         return 0.5 * loss + 0.1 * ops::cast(ops::mean(t[0] * t[0]), loss.dtype());
       }},
  };
  return kCases;
}

Tensors inputs_of(const Case& c, const std::shared_ptr<Context>& context, DType dtype) {
  Tensors inputs;
  for (const Shape& shape : c.inputs)
    inputs.push_back(random_tensor(context, shape, dtype, 11 + inputs.size()));
  return inputs;
}

TEST_CASE("operations: gradients on the CPU and with the CUDA kernels") {
  for (const bool cuda : {false, true}) {
    for (const Case& c : cases()) {
      CAPTURE(cuda);
      CAPTURE(std::string(c.name));
      const auto context =
          cuda ? Context::create({.device = {DeviceType::CUDA, 0}, .plugin = fiber_plugin()})
               : Context::create({.threads = 2});
      Tensors inputs = inputs_of(c, context, DType::F64);
      for (Tensor& input : inputs) input.set_requires_grad(true);
      CHECK(c.operation(inputs).shape() == c.result);
      CHECK(testing::gradcheck(c.operation, inputs));
      CHECK(compare_bf16(c.operation, inputs_of(c, context, DType::BF16), 0.02) == "");
    }
  }
}

TEST_CASE("operations: f32 has the results of f64") {
  for (const Case& c : cases()) {
    CAPTURE(std::string(c.name));
    const auto context = Context::create();
    Tensors wide = inputs_of(c, context, DType::F64), narrow;
    for (Tensor& input : wide) {
      narrow.push_back(convert(input, DType::F32).set_requires_grad(true));
      input.set_requires_grad(true);
    }
    const auto run = [&](const Tensors& inputs) {
      const Tensor y = c.operation(inputs);
      autograd::backward(y, Tensor::full(context, y.shape(), y.dtype(), 0.5));
      std::vector<double> values = values_of(y);
      for (const Tensor& input : inputs)
        for (const double value : values_of(input.grad())) values.push_back(value);
      return values;
    };
    const std::vector<double> expected = run(wide), found = run(narrow);
    for (std::size_t i = 0; i < expected.size(); ++i)
      CHECK(found[i] == doctest::Approx(expected[i]).epsilon(1e-5));
  }
}

TEST_CASE("operations: shapes on the meta device, forward and backward") {
  const auto context = Context::create({.device = {DeviceType::Meta, 0}});
  for (const Case& c : cases()) {
    CAPTURE(std::string(c.name));
    Tensors inputs;
    for (const Shape& shape : c.inputs)
      inputs.push_back(Tensor::empty(context, shape, DType::BF16).set_requires_grad(true));
    const Tensor y = c.operation(inputs);
    CHECK(y.shape() == c.result);
    autograd::backward(y, Tensor::empty(context, y.shape(), y.dtype()));
    for (const Tensor& input : inputs) CHECK(input.grad().shape() == input.shape());
  }
}

TEST_CASE("operations: results do not depend on the number of threads") {
  for (const Case& c : cases()) {
    CAPTURE(std::string(c.name));
    std::vector<double> expected;
    for (const int threads : {1, 2, 3}) {
      const auto context = Context::create({.threads = threads});
      Tensors inputs = inputs_of(c, context, DType::F32);
      for (Tensor& input : inputs) input.set_requires_grad(true);
      const Tensor y = c.operation(inputs);
      autograd::backward(y, Tensor::full(context, y.shape(), y.dtype(), 0.5));
      std::vector<double> values = values_of(y);
      for (const Tensor& input : inputs)
        for (const double value : values_of(input.grad())) values.push_back(value);
      if (threads == 1) expected = values;
      CHECK(values == expected);
    }
  }
}

}  // namespace
}  // namespace tessera::test
