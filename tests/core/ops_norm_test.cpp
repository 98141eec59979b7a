#include <doctest/doctest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/ops/elementwise.h"
#include "core/ops/norm.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

TEST_CASE("layer_norm and rms_norm: gradients, over odd shapes") {
  const auto context = Context::create();
  for (const Shape& shape : {Shape{5}, Shape{1, 2}, Shape{4, 7}, Shape{2, 3, 5}}) {
    CAPTURE(shape.str());
    const Shape channels{shape.back()};
    Tensor x = random_tensor(context, shape, DType::F64, 1).set_requires_grad(true);
    Tensor w = random_tensor(context, channels, DType::F64, 2).set_requires_grad(true);
    Tensor b = random_tensor(context, channels, DType::F64, 3).set_requires_grad(true);
    const auto f = [](const std::vector<Tensor>& t) {
      return ops::layer_norm(t[0], t[1], t[2], 1e-2);
    };
    CHECK(gradcheck(f, {x, w, b}) == "");
    CHECK(gradcheck(f, {x, w.detach(), b.detach()}) == "");
    CHECK(gradcheck(f, {x.detach(), w, b.detach()}) == "");
    CHECK(gradcheck(f, {x.detach(), w.detach(), b}) == "");
    // The same tensor as weight and bias: both gradients accumulate in one buffer.
    const auto one = [](const std::vector<Tensor>& t) {
      return ops::layer_norm(t[0], t[1], t[1], 1e-2);
    };
    CHECK(gradcheck(one, {x, w}) == "");

    const auto rms = [](const std::vector<Tensor>& t) { return ops::rms_norm(t[0], t[1], 1e-2); };
    CHECK(gradcheck(rms, {x, w}) == "");
    CHECK(gradcheck(rms, {x, w.detach()}) == "");
    CHECK(gradcheck(rms, {x.detach(), w}) == "");
    const auto shifted = [](const auto& t) { return ops::rms_norm(t[0], t[1], 1e-2, 1.0); };
    CHECK(gradcheck(shifted, {x, w}) == "");
    const auto plain = [](const auto& t) { return ops::rms_norm(t[0], {}, 1e-2); };
    CHECK(gradcheck(plain, {x}) == "");
  }
}

TEST_CASE("layer_norm and rms_norm: bf16 matches f32") {
  const auto context = Context::create();
  const std::vector<Tensor> t{random_tensor(context, {9, 33}, DType::BF16, 1),
                              random_tensor(context, {33}, DType::BF16, 2),
                              random_tensor(context, {33}, DType::BF16, 3)};
  const auto layer = [](const auto& in) { return ops::layer_norm(in[0], in[1], in[2], 1e-5); };
  const auto rms = [](const auto& in) { return ops::rms_norm(in[0], in[1], 1e-5); };
  CHECK(compare_bf16(layer, t, 0.01) == "");
  CHECK(compare_bf16(rms, {t[0], t[1]}, 0.01) == "");
}

TEST_CASE("layer_norm: statistics are saved only if a backward may follow") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {6, 4}, DType::F32, 1).set_requires_grad(true);
  const Tensor w = random_tensor(context, {4}, DType::F32, 2);
  const std::int64_t before = context->ledger().total().current;
  const auto result = static_cast<std::int64_t>(x.bytes());
  const Tensor y = ops::layer_norm(x, w, w, 1e-5);
  CHECK(context->ledger().total().current - before == result + 2 * 6 * 4);
  const NoGradGuard off(*context);
  const Tensor z = ops::layer_norm(x, w, w, 1e-5);
  CHECK(context->ledger().total().current - before == 2 * result + 2 * 6 * 4);
}

TEST_CASE("layer_norm: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  const Tensor w = random_tensor(context, {3}, DType::F32, 2);
  const Tensor wide = random_tensor(context, {4}, DType::F32, 2);
  CHECK_THROWS_WITH_AS(ops::layer_norm(x, wide, w, 1e-5),
                       doctest::Contains("weight must have shape [3], got [4]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::layer_norm(x, w, wide, 1e-5),
                       doctest::Contains("bias must have shape [3], got [4]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::layer_norm(x, w, convert(w, DType::F64), 1e-5),
                       doctest::Contains("bias must have dtype f32, got f64"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::layer_norm(x, w, w, 0.0), doctest::Contains("above 0, got 0"),
                       InvalidArgument);
  CHECK_THROWS_AS(ops::layer_norm(x, w, w, std::nan("")), InvalidArgument);
  const Tensor none = Tensor::empty(context, {0}, DType::F32);
  CHECK_THROWS_WITH_AS(
      ops::layer_norm(Tensor::empty(context, {2, 0}, DType::F32), none, none, 1e-5),
      doctest::Contains("[2, 0]"), InvalidArgument);
}

TEST_CASE("rms_norm: formula") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {3, 7}, DType::F64, 1, 2.0);
  const Tensor w = random_tensor(context, {7}, DType::F64, 2);
  const Tensor y = ops::rms_norm(x, w, 1e-2);
  for (int r = 0; r < 3; ++r) {
    const double* row = x.data<double>() + 7 * r;
    double squares = 0.0;
    for (int c = 0; c < 7; ++c) squares += row[c] * row[c] / 7;
    for (int c = 0; c < 7; ++c) {
      const double expected = w.data<double>()[c] * row[c] / std::sqrt(squares + 1e-2);
      CHECK(y.data<double>()[7 * r + c] == doctest::Approx(expected).epsilon(1e-9));
    }
  }
}

TEST_CASE("rms_norm: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  const Tensor w = random_tensor(context, {3}, DType::F32, 2);
  CHECK_THROWS_WITH_AS(ops::rms_norm(x, random_tensor(context, {4}, DType::F32, 2), 1e-5),
                       "rms_norm: weight must have shape [3], got [4]", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::rms_norm(x, w, -1.0), "rms_norm: eps must be above 0, got -1",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::add_rms_norm(x, w, w, 1e-5),
                       "add_rms_norm: residual must have shape [2, 3], got [3]", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::add_layer_norm(x, {}, w, w, 1e-5),
                       "add_layer_norm: residual is undefined", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::add_layer_norm(x, convert(x, DType::BF16), w, w, 1e-5),
      "add_layer_norm: residual must have dtype f32, got bf16; convert it with ops::cast",
      InvalidArgument);
}

// Inputs: x, residual, weight, bias.
ops::SumAndNorm add_layer_norm(const std::vector<Tensor>& t) {
  return ops::add_layer_norm(t[0], t[1], t[2], t[3], 1e-2);
}
ops::SumAndNorm add_rms_norm(const std::vector<Tensor>& t) {
  return ops::add_rms_norm(t[0], t[1], t[2], 1e-2);
}

TEST_CASE("add_layer_norm and add_rms_norm: gradients, whichever result is used") {
  const auto context = Context::create();
  for (const auto norm : {add_layer_norm, add_rms_norm}) {
    CAPTURE(norm == add_layer_norm);
    std::vector<Tensor> t{random_tensor(context, {2, 3, 5}, DType::F64, 1),
                          random_tensor(context, {2, 3, 5}, DType::F64, 2),
                          random_tensor(context, {5}, DType::F64, 3),
                          random_tensor(context, {5}, DType::F64, 4)};
    const auto both = [norm](const std::vector<Tensor>& in) {
      const auto [sum, y] = norm(in);
      return ops::add(sum, y);
    };
    const auto only_y = [norm](const std::vector<Tensor>& in) { return norm(in).y; };
    const auto only_sum = [norm](const std::vector<Tensor>& in) { return norm(in).sum; };
    // y comes first, so that backward runs the sum's other user after the norm.
    const auto later = [norm](const std::vector<Tensor>& in) {
      const auto [sum, y] = norm(in);
      return ops::add(ops::add(y, y), ops::add(sum, sum));
    };
    for (std::size_t i = 0; i < 2; ++i) t[i].set_requires_grad(true);
    CHECK(gradcheck(only_sum, t) == "");
    t[2].set_requires_grad(true);
    if (norm == add_layer_norm) t[3].set_requires_grad(true);
    CHECK(gradcheck(both, t) == "");
    CHECK(gradcheck(only_y, t) == "");
    CHECK(gradcheck(later, t) == "");
    const auto twice = [norm](const std::vector<Tensor>& in) {
      const auto [sum, y] = norm({in[0], in[0], in[2], in[3]});
      return ops::add(sum, y);
    };
    t[1].set_requires_grad(false);
    CHECK(gradcheck(twice, t) == "");
  }
}

TEST_CASE("add_layer_norm and add_rms_norm: bit-identical to addition and norm") {
  const auto context = Context::create();
  for (const DType dtype : {DType::F32, DType::BF16}) {
    const auto input = [&](const Shape& shape, std::uint64_t seed) {
      return random_tensor(context, shape, dtype, seed).set_requires_grad(true);
    };
    for (const bool layer : {true, false}) {
      CAPTURE(dtype_name(dtype));
      CAPTURE(layer);
      const auto run = [&](bool fused) {
        const std::vector<Tensor> t{input({9, 33}, 1), input({9, 33}, 2), input({33}, 3),
                                    input({33}, 4)};
        Tensor sum, y;
        if (fused) {
          const auto results = layer ? add_layer_norm(t) : add_rms_norm(t);
          sum = results.sum;
          y = results.y;
        } else {
          sum = ops::add(t[0], t[1]);
          y = layer ? ops::layer_norm(sum, t[2], t[3], 1e-2) : ops::rms_norm(sum, t[2], 1e-2);
        }
        const Tensor out = ops::add(y, sum);
        autograd::backward(out, random_tensor(context, {9, 33}, dtype, 5));
        std::vector<std::vector<double>> values{values_of(sum), values_of(y)};
        for (const Tensor& tensor : t)
          if (tensor.grad().defined()) values.push_back(values_of(tensor.grad()));
        return values;
      };
      const auto fused = run(true);
      CHECK(fused.size() == (layer ? 6 : 5));
      CHECK(fused == run(false));
    }
  }
}

}  // namespace
}  // namespace tessera::test
