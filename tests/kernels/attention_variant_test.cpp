// Masks and caps of attention's scores; attention_test.cpp tests plain causal attention.
#include <limits>
#include <optional>

#include "kernels/attention.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::attention_backward;
using kernels::attention_forward;
using kernels::AttentionVariant;

constexpr float kScale = 0.375F;
constexpr double kBefore = 0.5;

struct Size {
  std::int64_t batch, queries, keys, heads, kv_heads, dim;
  Shape q() const { return {batch, queries, heads, dim}; }
  Shape k() const { return {batch, keys, kv_heads, dim}; }
};

struct Variant {
  bool causal = true;
  std::int64_t window = 0;
  float softcap = 0.0F;
  std::int64_t document = 0;  // tokens per document; 0: no documents
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Ids of documents: sequence b has borders b tokens earlier. `repeat` gives every third document
/// the same id, so that ids are not ascending.
std::vector<std::int32_t> document_ids(const Size& s, std::int64_t length, bool repeat) {
  std::vector<std::int32_t> ids;
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t j = 0; j < s.keys; ++j) {
      const std::int64_t id = (j + b) / length;
      ids.push_back(static_cast<std::int32_t>(repeat ? id % 3 - 1 : id));
    }
  return ids;
}

struct Values {
  std::vector<double> q, k, v, grad_out;
};

/// Attention by definition, in float64.
struct Expected {
  Expected(const Size& s, const Variant& variant, const std::vector<std::int32_t>& documents,
           const Values& x)
      : out(x.q.size()),
        log_sum_exp(at(s.batch * s.heads * s.queries)),
        grad_q(x.q.size()),
        grad_k(x.k.size()),
        grad_v(x.v.size()) {
    const auto scale = static_cast<double>(kScale), cap = static_cast<double>(variant.softcap);
    for (std::int64_t b = 0; b < s.batch; ++b)
      for (std::int64_t h = 0; h < s.heads; ++h)
        for (std::int64_t i = 0; i < s.queries; ++i) {
          const std::int64_t position = i + s.keys - s.queries;
          const std::size_t q = at(((b * s.queries + i) * s.heads + h) * s.dim);
          const auto row = [&](std::int64_t j) {
            return at(((b * s.keys + j) * s.kv_heads + h / (s.heads / s.kv_heads)) * s.dim);
          };
          std::vector<std::int64_t> seen;
          std::vector<double> p, slopes;
          double sum = 0.0, delta = 0.0;
          for (std::int64_t j = 0; j < s.keys; ++j) {
            if (variant.causal && j > position) continue;
            if (variant.window > 0 && j <= position - variant.window) continue;
            if (!documents.empty() &&
                documents[at(b * s.keys + j)] != documents[at(b * s.keys + position)])
              continue;
            double score = 0.0;
            for (std::size_t d = 0; d < at(s.dim); ++d) score += x.q[q + d] * x.k[row(j) + d];
            score *= scale;
            const double tanh = cap > 0.0 ? std::tanh(score / cap) : 0.0;
            seen.push_back(j);
            slopes.push_back(1.0 - tanh * tanh);
            p.push_back(std::exp(cap > 0.0 ? cap * tanh : score));
            sum += p.back();
          }
          log_sum_exp[at((b * s.heads + h) * s.queries + i)] = std::log(sum);
          std::vector<double> grad_p(p.size());
          for (std::size_t n = 0; n < seen.size(); ++n) {
            const std::size_t kv = row(seen[n]);
            p[n] /= sum;
            for (std::size_t d = 0; d < at(s.dim); ++d) {
              out[q + d] += p[n] * x.v[kv + d];
              grad_p[n] += x.grad_out[q + d] * x.v[kv + d];
              grad_v[kv + d] += p[n] * x.grad_out[q + d];
            }
            delta += p[n] * grad_p[n];
          }
          for (std::size_t n = 0; n < seen.size(); ++n) {
            const std::size_t kv = row(seen[n]);
            const double grad_score = p[n] * (grad_p[n] - delta) * slopes[n] * scale;
            for (std::size_t d = 0; d < at(s.dim); ++d) {
              grad_q[q + d] += grad_score * x.k[kv + d];
              grad_k[kv + d] += grad_score * x.q[q + d];
            }
          }
        }
  }
  std::vector<double> out, log_sum_exp, grad_q, grad_k, grad_v;
};

constexpr int kCpu = 1;     // CPU contexts alone
constexpr int kRepeat = 2;  // ids that are not ascending

void check_variant(DType dtype, const Size& s, const Variant& variant, int flags = 0) {
  CAPTURE(dtype_name(dtype));
  CAPTURE(s.queries);
  CAPTURE(s.keys);
  CAPTURE(s.dim);
  CAPTURE(variant.causal);
  CAPTURE(variant.window);
  CAPTURE(variant.softcap);
  CAPTURE(variant.document);
  const auto normal = [&](const Shape& shape, std::uint64_t seed) {
    return rounded(dtype, Buffer::normal(numel(shape), seed, s.dim > 64 ? 0.5 : 1.0));
  };
  const Values x{normal(s.q(), 1), normal(s.k(), 2), normal(s.k(), 3), normal(s.q(), 4)};
  const std::vector<std::int32_t> ids =
      variant.document > 0 ? document_ids(s, variant.document, (flags & kRepeat) != 0)
                           : std::vector<std::int32_t>{};
  const Expected expected(s, variant, ids, x);
  std::optional<CpuLevel> level;
  std::vector<std::vector<char>> one_thread;
  const auto check_context = [&](Context& context) {
    const Buffer q(dtype, s.q(), x.q), k(dtype, s.k(), x.k), v(dtype, s.k(), x.v);
    const Buffer grad_out(dtype, s.q(), x.grad_out), out(dtype, s.q());
    const Buffer log_sum_exp(accumulator_dtype(dtype), {s.batch, s.heads, s.queries});
    std::optional<IndexBuffer> documents;
    AttentionVariant given{variant.causal, variant.window, variant.softcap};
    if (!ids.empty()) given.documents = documents.emplace(Shape{s.batch, s.keys}, ids).view();
    attention_forward(
        context, {q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(), kScale, given});
    // AVX512-BF16 also rounds the weights of bf16 values to bf16.
    const double out_magnitude = dtype != DType::BF16                 ? 10.0
                                 : rounds_weights(context, s.queries) ? 1.0
                                                                      : 0.01;
    check_close(out.values(), expected.out, tolerance(dtype), out_magnitude);
    check_close(log_sum_exp.values(), expected.log_sum_exp, tolerance(accumulator_dtype(dtype)),
                10.0);

    // bf16: backward reads a rounded out.
    const double magnitude =
        dtype == DType::BF16 ? 4.0 + std::sqrt(static_cast<double>(s.dim)) : 10.0;
    std::vector<std::vector<char>> bytes{out.bytes(), log_sum_exp.bytes()};
    for (const bool accumulate : {false, true}) {
      const Buffer grad_q(dtype, s.q(), kBefore), grad_k(dtype, s.k(), kBefore),
          grad_v(dtype, s.k(), kBefore);
      attention_backward(
          context, {q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(), grad_out.view(),
                    grad_q.gradient(accumulate), grad_k.gradient(accumulate),
                    grad_v.gradient(accumulate), kScale, given});
      const auto check = [&](const Buffer& gradient, std::vector<double> want) {
        if (accumulate)
          for (double& value : want) value += kBefore;
        check_close(gradient.values(), want, tolerance(dtype), magnitude);
        bytes.push_back(gradient.bytes());
      };
      check(grad_q, expected.grad_q);
      check(grad_k, expected.grad_k);
      check(grad_v, expected.grad_v);
    }
    if (context.device().type != DeviceType::CPU) return;
    if (level != context.cpu_level()) {
      level = context.cpu_level();
      one_thread = bytes;
    }
    CHECK(bytes == one_thread);
  };
  if ((flags & kCpu) == 0)
    for_each_context(check_context);
  else if (!gpu_only())
    for_each_cpu_context(check_context);
}

/// Calls f(variant) for every combination of mask, cap and documents but plain causal attention.
template <typename F>
void for_each_variant(F&& f) {
  for (const float softcap : {0.0F, 1.5F})
    for (const std::int64_t document : {0, 13}) {
      f({false, 0, softcap, document});
      if (softcap > 0.0F || document > 0) f({true, 0, softcap, document});
      for (const std::int64_t window : {1, 25}) f({true, window, softcap, document});
    }
}

TEST_CASE("attention variants match float64: every mask, with and without a cap") {
  for (const DType dtype : kComputingDTypes)
    for_each_variant([&](const Variant& variant) {
      check_variant(dtype, {1, 33, 33, 2, 1, 3}, variant);
    });
}

TEST_CASE("attention variants match float64 on CPUs for more shapes") {
  for (const DType dtype : kComputingDTypes)
    for (const Size& s : {Size{2, 67, 67, 4, 2, 5},
                          {1, 31, 131, 3, 3, 17},
                          {2, 1, 70, 4, 1, 8},
                          {2, 3, 70, 10, 5, 9}})
      for_each_variant([&](const Variant& variant) { check_variant(dtype, s, variant, kCpu); });
}

TEST_CASE("attention variants match float64 over several tiles and for all head dims") {
  for (const DType dtype : kComputingDTypes) {
    check_variant(dtype, {1, 70, 100, 2, 1, 16}, {false, 0, 0.0F, 40});
    check_variant(dtype, {2, 100, 100, 1, 1, 16}, {true, 50, 4.0F, 0});
    check_variant(dtype, {1, 100, 100, 2, 1, 16}, {true, 40, 0.0F, 11}, kRepeat);
    for (const std::int64_t dim : {64, 104, 128, 251, 256})
      check_variant(dtype, {1, 19, 37, 2, 1, dim}, {true, 9, 3.0F, 11});
  }
}

TEST_CASE("full attention takes fewer keys than queries") {
  for (const DType dtype : kComputingDTypes) {
    check_variant(dtype, {2, 70, 3, 2, 1, 8}, {false, 0, 0.0F, 0});
    check_variant(dtype, {1, 33, 1, 2, 2, 3}, {false, 0, 2.0F, 0});
  }
}

// Weights of 0 do not remove a NaN, so that results without NaN prove that it was not read.
TEST_CASE("attention skips tiles of keys outside of the window or the documents") {
  constexpr Size kSize{1, 3, 129, 2, 1, 8};
  constexpr std::int64_t kSkipped = 64;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for_each_context_and_dtype([&](Context& context, DType dtype) {
    for (const bool windowed : {true, false}) {
      CAPTURE(windowed);
      std::vector<double> values = Buffer::normal(numel(kSize.k()), 1);
      std::fill_n(values.begin(), kSkipped * kSize.kv_heads * kSize.dim, nan);
      std::vector<std::int32_t> ids(at(kSize.keys), 4);
      std::fill_n(ids.begin(), kSkipped, 3);
      const IndexBuffer documents({1, kSize.keys}, ids);
      AttentionVariant variant;
      if (windowed)
        variant.window = 5;
      else
        variant.documents = documents.view();
      const Buffer q(dtype, kSize.q(), Buffer::normal(numel(kSize.q()), 2));
      const Buffer k(dtype, kSize.k(), values), v(dtype, kSize.k(), values);
      const Buffer out(dtype, kSize.q()), log_sum_exp(accumulator_dtype(dtype), {1, 2, 3});
      attention_forward(
          context, {q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(), kScale, variant});
      const Buffer grad_q(dtype, kSize.q(), nan), grad_k(dtype, kSize.k(), nan),
          grad_v(dtype, kSize.k(), nan);
      attention_backward(context, {q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(),
                                   q.view(), grad_q.gradient(false), grad_k.gradient(false),
                                   grad_v.gradient(false), kScale, variant});
      for (const Buffer* result : {&out, &grad_q, &grad_k, &grad_v})
        for (const double value : result->values()) REQUIRE(std::isfinite(value));
      for (const Buffer* gradient : {&grad_k, &grad_v})
        for (std::int64_t i = 0; i < kSkipped * kSize.dim; ++i)
          REQUIRE(gradient->values()[at(i)] == 0.0);
    }
  });
}

TEST_CASE("attention with a cap stays finite for extreme scores, without a gradient") {
  for_each_context_and_dtype([&](Context& context, DType dtype) {
    const Size s{1, 2, 2, 1, 1, 1};
    const Buffer q(dtype, s.q(), {1.0, 1.0}), k(dtype, s.k(), {-1e6, 1e6}), v(dtype, s.k(), {1, 2});
    const Buffer out(dtype, s.q()), log_sum_exp(accumulator_dtype(dtype), {1, 1, 2});
    const AttentionVariant variant{.softcap = 2.0F};
    attention_forward(
        context, {q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(), kScale, variant});
    const double low = std::exp(-2.0), high = std::exp(2.0);
    check_close(out.values(), {1.0, (low + 2.0 * high) / (low + high)}, tolerance(dtype), 1.0);
    check_close(log_sum_exp.values(), {-2.0, std::log(low + high)}, 1e-6, 1.0);
    const Buffer grad_q(dtype, s.q()), grad_k(dtype, s.k()), grad_v(dtype, s.k());
    attention_backward(context, {q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(),
                                 q.view(), grad_q.gradient(false), grad_k.gradient(false),
                                 grad_v.gradient(false), kScale, variant});
    check_close(grad_q.values(), {0.0, 0.0}, 0.0);
    check_close(grad_k.values(), {0.0, 0.0}, 0.0);
  });
}

TEST_CASE("a cap far above the scores changes little, down to small scores") {
  for_each_context([&](Context& context) {
    const Size s{1, 1, 2, 1, 1, 1};
    for (const double key : {1e-5, 1e-2, 1.0, 20.0}) {
      CAPTURE(key);
      const double scaled = key * static_cast<double>(kScale);
      const Buffer q(DType::F32, s.q(), 1.0), k(DType::F32, s.k(), {key, -key});
      const Buffer v(DType::F32, s.k(), {1.0, -1.0}), out(DType::F32, s.q());
      attention_forward(context, {q.view(),
                                  k.view(),
                                  v.view(),
                                  out.view(),
                                  {},
                                  kScale,
                                  AttentionVariant{.softcap = 30.0F}});
      check_close(out.values(), {std::tanh(30.0 * std::tanh(scaled / 30.0))}, 1e-6, 0.1);
    }
  });
}

}  // namespace
}  // namespace tessera::test
