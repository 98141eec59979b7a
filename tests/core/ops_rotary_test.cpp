#include <doctest/doctest.h>

#include <cmath>

#include "core/ops/rotary.h"
#include "core/ops/view.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

TEST_CASE("rotary: formula") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3, 2, 6}, DType::F64, 1);
  const Tensor y = ops::rotary(x, {.base = 100}, 7);
  const double *in = x.data<double>(), *out = y.data<double>();
  for (int token = 0; token < 6; ++token) {
    for (int head = 0; head < 2; ++head) {
      for (int i = 0; i < 3; ++i) {
        const int at = (2 * token + head) * 6 + i;
        const double angle = (7 + token % 3) * std::pow(100.0, -2.0 * i / 6);
        CHECK(out[at] == doctest::Approx(in[at] * std::cos(angle) - in[at + 3] * std::sin(angle)));
        CHECK(out[at + 3] ==
              doctest::Approx(in[at + 3] * std::cos(angle) + in[at] * std::sin(angle)));
      }
    }
  }
}

TEST_CASE("rotary_packed: rotates queries and keys as rotary does, and leaves values unchanged") {
  const auto context = Context::create();
  const std::int64_t heads = 3, kv_heads = 2, dim = 4, all = heads + 2 * kv_heads;
  const Tensor qkv = random_tensor(context, {2, 5, all * dim}, DType::F32, 1);
  const Tensor packed = ops::rotary_packed(qkv, heads, kv_heads, {.base = 1e4}, 11);
  CHECK(packed.shape() == qkv.shape());
  const Tensor plain = ops::rotary(ops::reshape(qkv, {2, 5, all, dim}), {.base = 1e4}, 11);
  const auto in = values_of(qkv), out = values_of(packed), rotated = values_of(plain);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto head = static_cast<std::int64_t>(i) / dim % all;
    CHECK(out[i] == (head < heads + kv_heads ? rotated[i] : in[i]));
  }
}

TEST_CASE("rotary: gradients") {
  const auto context = Context::create();
  for (const Shape& shape : {Shape{1, 1, 1, 2}, Shape{2, 3, 5, 6}}) {
    CAPTURE(shape.str());
    Tensor x = random_tensor(context, shape, DType::F64, 1).set_requires_grad(true);
    CHECK(gradcheck([](const auto& t) { return ops::rotary(t[0], {.base = 1e4}, 3); }, {x}) == "");
  }
  Tensor qkv = random_tensor(context, {2, 3, 8 * 6}, DType::F64, 2).set_requires_grad(true);
  CHECK(gradcheck([](const auto& t) { return ops::rotary_packed(t[0], 4, 2, {.base = 1e4}); },
                  {qkv}) == "");
}

TEST_CASE("rotary: bf16 matches f32") {
  const auto context = Context::create();
  CHECK(compare_bf16([](const auto& t) { return ops::rotary(t[0], {.base = 1e4}, 3); },
                     {random_tensor(context, {2, 3, 5, 8}, DType::BF16, 1)}, 0.01) == "");
}

TEST_CASE("rotary: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3, 4, 5}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(
      ops::rotary(x, {.base = 1e4}),
      "rotary: 5 of 5 numbers of a head turn; expected an even number of at most 5",
      InvalidArgument);
  const Tensor packed = ops::reshape(x, {2, 3, 20});
  CHECK_THROWS_WITH_AS(ops::rotary(packed, {.base = 1e4}),
                       "rotary: x must be [B, T, H, D], got shape [2, 3, 20]", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::rotary_packed(packed, 4, 2, {.base = 1e4}),
                       doctest::Contains("[2, 3, 20] with n_head 4 and n_kv_head 2"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::rotary_packed(packed, 8, 1, {.base = 0.5}),
                       doctest::Contains("base must be 1 or more, got 0.5"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::rotary_packed(packed, 8, 1, {.base = 1e4}, -1),
                       doctest::Contains("positions [-1, -1 + 3)"), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
