#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "core/ops/attention.h"
#include "core/ops/view.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

// Softmax attention by definition, in double.
std::vector<double> reference(const Tensor& qkv, std::int64_t heads) {
  const std::int64_t batch = qkv.dim(0), time = qkv.dim(1), width = qkv.dim(2) / 3;
  const std::int64_t head_dim = width / heads;
  const std::vector<double> x = values_of(qkv);
  const auto at = [&](std::int64_t b, std::int64_t t, int part, std::int64_t h, std::int64_t d) {
    return x[static_cast<std::size_t>(((b * time + t) * 3 + part) * width + h * head_dim + d)];
  };
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  std::vector<double> out;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t i = 0; i < time; ++i)
      for (std::int64_t h = 0; h < heads; ++h) {
        std::vector<double> weights;
        double sum = 0.0;
        for (std::int64_t j = 0; j <= i; ++j) {
          double score = 0.0;
          for (std::int64_t d = 0; d < head_dim; ++d)
            score += at(b, i, 0, h, d) * at(b, j, 1, h, d);
          weights.push_back(std::exp(score * scale));
          sum += weights.back();
        }
        for (std::int64_t d = 0; d < head_dim; ++d) {
          double value = 0.0;
          for (std::int64_t j = 0; j <= i; ++j)
            value += weights[static_cast<std::size_t>(j)] / sum * at(b, j, 2, h, d);
          out.push_back(value);
        }
      }
  return out;
}

void check_near(const std::vector<double>& found, const std::vector<double>& expected,
                double tolerance) {
  REQUIRE(found.size() == expected.size());
  double error = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double difference = std::abs(found[i] - expected[i]);
    error = difference <= error ? error : difference;  // a NaN persists
  }
  CHECK(error <= tolerance);
}

struct Case {
  std::int64_t batch, time, heads, head_dim;
  Shape shape() const { return {batch, time, 3 * heads * head_dim}; }
};

TEST_CASE("causal_attention: matches its definition, over odd shapes and tile borders") {
  const auto context = Context::create();
  for (const Case& c :
       {Case{1, 1, 1, 1}, Case{2, 7, 3, 5}, Case{1, 65, 2, 8}, Case{1, 130, 1, 3}}) {
    const Tensor qkv = random_tensor(context, c.shape(), DType::F64, 1);
    CAPTURE(qkv.shape().str());
    const std::vector<double> expected = reference(qkv, c.heads);
    const Tensor out = ops::causal_attention(qkv, c.heads);
    CHECK(out.shape() == Shape{c.batch, c.time, c.heads * c.head_dim});
    // Tolerance: the scale 1 / sqrt(D) is a float.
    check_near(values_of(out), expected, 1e-6);
    check_near(values_of(ops::causal_attention(convert(qkv, DType::F32), c.heads)), expected, 1e-5);
  }
}

TEST_CASE("causal_attention: large scores do not overflow") {
  const auto context = Context::create();
  const Tensor qkv = random_tensor(context, {1, 9, 12}, DType::F32, 1, 100.0);
  for (const double value : values_of(ops::causal_attention(qkv, 2))) CHECK(std::isfinite(value));
}

TEST_CASE("causal_attention: later positions have no influence") {
  const auto context = Context::create();
  Tensor qkv = random_tensor(context, {1, 6, 12}, DType::F32, 1);
  const std::vector<double> before = values_of(ops::causal_attention(qkv, 2));
  for (int i = 4 * 12; i < 6 * 12; ++i) qkv.data<float>()[i] = 9.0F;
  const std::vector<double> after = values_of(ops::causal_attention(qkv, 2));
  CHECK(std::equal(before.begin(), before.begin() + 4 * 4, after.begin()));
  CHECK(before != after);
}

TEST_CASE("causal_attention: gradients") {
  const auto context = Context::create();
  for (const Case& c : {Case{1, 1, 1, 2}, Case{2, 3, 1, 1}, Case{2, 5, 2, 3}, Case{1, 9, 3, 2}}) {
    Tensor qkv = random_tensor(context, c.shape(), DType::F64, 1).set_requires_grad(true);
    CAPTURE(qkv.shape().str());
    CHECK(gradcheck([&](const auto& t) { return ops::causal_attention(t[0], c.heads); }, {qkv}) ==
          "");
  }
}

TEST_CASE("causal_attention: bf16 matches f32") {
  const auto context = Context::create();
  CHECK(compare_bf16([](const auto& t) { return ops::causal_attention(t[0], 2); },
                     {random_tensor(context, {2, 19, 48}, DType::BF16, 1)}, 0.02) == "");
}

TEST_CASE("causal_attention: keeps its result without a reference cycle") {
  const auto context = Context::create();
  Tensor qkv = random_tensor(context, {1, 4, 12}, DType::F32, 1).set_requires_grad(true);
  { const Tensor out = ops::causal_attention(qkv, 2); }
  CHECK(context->ledger().total().current == static_cast<std::int64_t>(qkv.bytes()));
}

TEST_CASE("causal_attention: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor qkv = random_tensor(context, {1, 4, 12}, DType::F32, 1);
  for (const std::int64_t heads : {0, 3, -1})
    CHECK_THROWS_WITH_AS(ops::causal_attention(qkv, heads),
                         doctest::Contains(fmt::format("[1, 4, 12] with n_head {}", heads).c_str()),
                         InvalidArgument);
  CHECK_THROWS_AS(ops::causal_attention(random_tensor(context, {1, 4, 11}, DType::F32, 1), 1),
                  InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::causal_attention(random_tensor(context, {4, 12}, DType::F32, 1), 2),
                       doctest::Contains("[B, T, 3 * H * D], got shape [4, 12]"), InvalidArgument);
}

// A copy of rows [begin, end) of the time dim.
Tensor slice_time(const Tensor& qkv, std::int64_t begin, std::int64_t end) {
  const std::int64_t batch = qkv.dim(0), time = qkv.dim(1), width = qkv.dim(2);
  std::vector<float> values;
  for (std::int64_t b = 0; b < batch; ++b) {
    const float* first = qkv.data<float>() + (b * time + begin) * width;
    values.insert(values.end(), first, first + (end - begin) * width);
  }
  return Tensor::from<float>(qkv.context(), {batch, end - begin, width}, values);
}

TEST_CASE("cached_attention: prompt, then token by token, equals causal_attention") {
  const auto context = Context::create();
  const std::int64_t batch = 2, time = 7, heads = 2, head_dim = 3, width = heads * head_dim;
  const Tensor qkv = random_tensor(context, {batch, time, 3 * width}, DType::F32, 1);
  const std::vector<float> whole = ops::causal_attention(qkv, heads).to_vector<float>();
  Tensor k = Tensor::full(context, {batch, 9, heads, head_dim}, DType::F32, 77.0);
  Tensor v = Tensor::full(context, {batch, 9, heads, head_dim}, DType::F32, 77.0);
  const std::uint64_t version = k.storage()->version();
  std::int64_t past = 0;
  for (const std::int64_t count : {4, 1, 1, 1}) {
    const Tensor out =
        ops::cached_attention(slice_time(qkv, past, past + count), heads, k, v, past);
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t i = 0; i < count * width; ++i)
        CHECK(out.data<float>()[b * count * width + i] ==
              doctest::Approx(whole[static_cast<std::size_t>((b * time + past) * width + i)])
                  .epsilon(1e-5));
    past += count;
  }
  CHECK(k.storage()->version() > version);
  CHECK(k.data<float>()[7 * width] == 77.0F);
}

TEST_CASE("cached_attention: refuses invalid arguments") {
  const auto context = Context::create();
  Tensor qkv = random_tensor(context, {1, 2, 12}, DType::F32, 1);
  const Tensor cache = Tensor::full(context, {1, 4, 2, 2}, DType::F32, 0.0);
  CHECK_THROWS_WITH_AS(ops::cached_attention(qkv, 2, cache, cache, 3),
                       doctest::Contains("3 past and 2 new tokens do not fit"), InvalidArgument);
  CHECK_THROWS_AS(ops::cached_attention(qkv, 2, cache, cache, -1), InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::cached_attention(qkv, 2, cache, Tensor::full(context, {1, 4, 1, 4}, DType::F32, 0.0), 0),
      doctest::Contains("cache_v must have shape [1, 4, 2, 2], got [1, 4, 1, 4]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::cached_attention(qkv, 2, cache, Tensor::full(context, {1, 5, 2, 2}, DType::F32, 0.0), 0),
      doctest::Contains("cache_k has shape [1, 4, 2, 2], cache_v [1, 5, 2, 2]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::cached_attention(qkv, 2, convert(cache, DType::F64), cache, 0),
                       doctest::Contains("cache_k must have dtype f32, got f64"), InvalidArgument);
  qkv.set_requires_grad(true);
  CHECK_THROWS_AS(ops::cached_attention(qkv, 2, cache, cache, 0), Unsupported);
  const NoGradGuard off(*context);
  CHECK(ops::cached_attention(qkv, 2, cache, cache, 0).shape() == Shape{1, 2, 4});
}

}  // namespace
}  // namespace tessera::test
