#include "core/testing/gradcheck.h"

#include <doctest/doctest.h>

#include <sstream>

#include "core/autograd/autograd.h"
#include "core/ops/elementwise.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

using testing::GradcheckResult;

// y = x^2 with `factor` times its gradient.
Tensor square(const Tensor& x, double factor) {
  const NoGradGuard off(*x.context());
  Tensor y = x.detach() * x.detach();
  const GradModeGuard on(*x.context(), true);
  autograd::record("square", y, {x},
                   [x = x.detach(), factor](const Tensor& grad_y, autograd::InputGradients& into) {
                     into.pass(0, 2.0 * factor * x * grad_y);
                   });
  return y;
}

TEST_CASE("gradcheck accepts a right gradient and restores the inputs") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {2, 3}, DType::F64, 1).set_requires_grad(true);
  const std::vector<double> before = values_of(x);
  const std::uint64_t version = x.storage()->version();
  const auto f = [](const std::vector<Tensor>& t) { return t[0] * t[0] / 2.0; };
  const GradcheckResult result = testing::gradcheck(f, {x});
  CHECK(result);
  CHECK(result.ok());
  CHECK(result.error <= 1.0);
  CHECK(result.input == 0);
  CHECK(result.expected == doctest::Approx(result.gradient));
  CHECK(values_of(x) == before);
  CHECK(x.storage()->version() > version);
}

TEST_CASE("gradcheck reports the worst element of a wrong gradient") {
  const auto context = Context::create();
  Tensor a = Tensor::full(context, {2}, DType::F64, 1.0).set_requires_grad(true);
  Tensor x = Tensor::from<double>(context, {3}, std::vector<double>{0.1, -3, 2});
  x.set_requires_grad(true);
  const auto f = [](const std::vector<Tensor>& t) { return square(t[1], 1.01); };
  const GradcheckResult missing = testing::gradcheck(f, {a, x});
  CHECK_FALSE(missing.ok());
  CHECK(missing.str() == "one backward: input 0 got no gradient");

  const GradcheckResult wrong =
      testing::gradcheck([](const auto& t) { return square(t[0], 1.01); }, {x});
  CHECK_FALSE(wrong);
  CHECK(wrong.input == 0);
  CHECK(wrong.element >= 0);
  CHECK(wrong.gradient == doctest::Approx(1.01 * wrong.expected));
  std::ostringstream text;
  text << wrong;
  CHECK(text.str() == fmt::format("{}", wrong));
  CHECK(text.str().find("one backward: gradient of input 0 at element ") == 0);
}

TEST_CASE("gradcheck refuses inputs that cannot be differentiated") {
  const auto context = Context::create();
  const auto f = [](const std::vector<Tensor>& t) { return t[0]; };
  Tensor x = random_tensor(context, {2}, DType::F32, 1).set_requires_grad(true);
  CHECK_THROWS_WITH_AS(testing::gradcheck(f, {x}),
                       "gradcheck: input 0 must be a contiguous f64 leaf, got [2] f32 with strides "
                       "[1]",
                       InvalidArgument);
  CHECK_THROWS_AS(testing::gradcheck(f, {x * 2.0}), InvalidArgument);
  CHECK_THROWS_AS(testing::gradcheck(f, {}), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
