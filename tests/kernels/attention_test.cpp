#include "kernels/attention.h"

#include <optional>

#include "kernel_support.h"

namespace tessera::test {
namespace {

using kernels::attention_backward;
using kernels::attention_forward;
using kernels::AttentionBackward;
using kernels::AttentionForward;

struct Size {
  std::int64_t batch, queries, keys, heads, kv_heads, dim;
};
constexpr Size kSizes[] = {{1, 1, 1, 1, 1, 1},   {2, 33, 33, 2, 1, 3},  {1, 31, 31, 3, 3, 33},
                           {1, 1, 33, 4, 2, 64}, {2, 3, 67, 2, 2, 31},  {1, 64, 64, 2, 2, 32},
                           {1, 40, 97, 4, 2, 5}, {1, 130, 130, 1, 1, 8}};
constexpr float kScale = 0.375F;
constexpr double kBefore = 0.5;

/// q, k and v as windows of one buffer [B, T, (H + 2 Hkv) D], as a fused projection makes them.
/// The first `queries` tokens of q are used.
class Packed {
 public:
  Packed(DType dtype, const Size& s, const std::vector<double>& values)
      : size_(s), buffer_(dtype, {s.batch, s.keys, width(s)}, values) {}
  static std::int64_t width(const Size& s) { return (s.heads + 2 * s.kv_heads) * s.dim; }
  static std::int64_t elements(const Size& s) { return s.batch * s.keys * width(s); }

  TensorView q() const { return window(0, size_.queries, size_.heads); }
  TensorView k() const { return window(size_.heads, size_.keys, size_.kv_heads); }
  TensorView v() const { return window(size_.heads + size_.kv_heads, size_.keys, size_.kv_heads); }
  const Buffer& buffer() const { return buffer_; }

 private:
  TensorView window(std::int64_t first_head, std::int64_t tokens, std::int64_t heads) const {
    const std::int64_t stride = width(size_);
    auto* data =
        static_cast<char*>(buffer_.view().data) +
        static_cast<std::size_t>(first_head * size_.dim) * dtype_size(buffer_.view().dtype);
    return {data,
            buffer_.view().dtype,
            {size_.batch, tokens, heads, size_.dim},
            {size_.keys * stride, stride, size_.dim, 1},
            buffer_.view().device};
  }
  Size size_;
  Buffer buffer_;
};

/// The definition, in float64: out, log_sum_exp and, for a given grad_out, the packed gradient.
struct Expected {
  Expected(const Size& s, const std::vector<double>& qkv, const std::vector<double>& grad_out)
      : out(at(s.batch * s.queries * s.heads * s.dim)),
        log_sum_exp(at(s.batch * s.heads * s.queries)),
        gradient(qkv.size(), 0.0) {
    const std::int64_t group = s.heads / s.kv_heads, width = Packed::width(s);
    for (std::int64_t b = 0; b < s.batch; ++b)
      for (std::int64_t h = 0; h < s.heads; ++h)
        for (std::int64_t i = 0; i < s.queries; ++i) {
          const std::int64_t seen = i + s.keys - s.queries + 1;
          const auto token = [&](std::int64_t t, std::int64_t head) {
            return at((b * s.keys + t) * width + head * s.dim);
          };
          const std::size_t q = token(i, h);
          const auto k = [&](std::int64_t j) { return token(j, s.heads + h / group); };
          const auto v = [&](std::int64_t j) { return token(j, s.heads + s.kv_heads + h / group); };
          const std::size_t o = at(((b * s.queries + i) * s.heads + h) * s.dim);
          std::vector<double> p(at(seen)), grad_p(at(seen), 0.0);
          double max = -1e300, sum = 0, delta = 0;
          for (std::int64_t j = 0; j < seen; ++j) {
            double score = 0;
            for (std::size_t d = 0; d < at(s.dim); ++d) score += qkv[q + d] * qkv[k(j) + d];
            p[at(j)] = score * static_cast<double>(kScale);
            max = std::max(max, p[at(j)]);
          }
          for (double& value : p) sum += value = std::exp(value - max);
          log_sum_exp[at((b * s.heads + h) * s.queries + i)] = max + std::log(sum);
          for (std::int64_t j = 0; j < seen; ++j) {
            p[at(j)] /= sum;
            for (std::size_t d = 0; d < at(s.dim); ++d) {
              out[o + d] += p[at(j)] * qkv[v(j) + d];
              grad_p[at(j)] += grad_out[o + d] * qkv[v(j) + d];
              gradient[v(j) + d] += p[at(j)] * grad_out[o + d];
            }
            delta += p[at(j)] * grad_p[at(j)];
          }
          for (std::int64_t j = 0; j < seen; ++j) {
            const double grad_score =
                p[at(j)] * (grad_p[at(j)] - delta) * static_cast<double>(kScale);
            for (std::size_t d = 0; d < at(s.dim); ++d) {
              gradient[q + d] += grad_score * qkv[k(j) + d];
              gradient[k(j) + d] += grad_score * qkv[q + d];
            }
          }
        }
  }
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  std::vector<double> out, log_sum_exp, gradient;
};

DType accumulator(DType dtype) { return dtype == DType::F64 ? DType::F64 : DType::F32; }

void check_size(DType dtype, const Size& s) {
  CAPTURE(dtype_name(dtype));
  CAPTURE(s.queries);
  CAPTURE(s.keys);
  CAPTURE(s.dim);
  const Shape out_shape = {s.batch, s.queries, s.heads, s.dim};
  std::vector<double> qkv_values = Buffer::normal(Packed::elements(s), 1);
  std::vector<double> grad_out_values = Buffer::normal(numel(out_shape), 2);
  qkv_values = Buffer(dtype, {Packed::elements(s)}, qkv_values).values();  // rounded
  grad_out_values = Buffer(dtype, {numel(out_shape)}, grad_out_values).values();
  const Expected expected(s, qkv_values, grad_out_values);
  // bf16: backward sees a rounded out, so the error of a score's gradient is that of a sum over
  // dim.
  const double magnitude =
      dtype == DType::BF16 ? 4.0 + std::sqrt(static_cast<double>(s.dim)) : 10.0;
  std::optional<CpuLevel> level;
  std::vector<char> out_one_thread, gradient_one_thread;
  for_each_context([&](Context& context) {
    const bool on_cpu = context.device().type == DeviceType::CPU;
    const Packed qkv(dtype, s, qkv_values);
    const Buffer grad_out(dtype, out_shape, grad_out_values);
    const Buffer out(dtype, out_shape);
    const Buffer log_sum_exp(accumulator(dtype), {s.batch, s.heads, s.queries});
    attention_forward(context, {qkv.q(), qkv.k(), qkv.v(), out.view(), log_sum_exp.view(), kScale});
    // Tensor cores take the weights of bf16 values as bf16, too.
    const double out_magnitude = dtype != DType::BF16 ? 10.0 : on_cpu ? 0.01 : 1.0;
    check_close(out.values(), expected.out, tolerance(dtype), out_magnitude);
    check_close(log_sum_exp.values(), expected.log_sum_exp, tolerance(accumulator(dtype)), 10.0);

    std::vector<char> gradient_bytes;
    for (const bool accumulate : {false, true}) {
      const Packed gradient(
          dtype, s, std::vector<double>(static_cast<std::size_t>(Packed::elements(s)), kBefore));
      attention_backward(context, {qkv.q(),
                                   qkv.k(),
                                   qkv.v(),
                                   out.view(),
                                   log_sum_exp.view(),
                                   grad_out.view(),
                                   {gradient.q(), accumulate, true},
                                   {gradient.k(), accumulate, true},
                                   {gradient.v(), accumulate, true},
                                   kScale});
      auto want = expected.gradient;
      for (std::size_t i = 0; i < want.size(); ++i) {
        const auto width = static_cast<std::size_t>(Packed::width(s));
        const bool past_queries =
            i % width < static_cast<std::size_t>(s.heads * s.dim) &&
            i / width % static_cast<std::size_t>(s.keys) >= static_cast<std::size_t>(s.queries);
        if (accumulate || past_queries) want[i] += kBefore;
      }
      check_close(gradient.buffer().values(), want, tolerance(dtype), magnitude);
      gradient_bytes = gradient.buffer().bytes();
    }
    if (!on_cpu) return;
    if (level != context.cpu_level()) {
      level = context.cpu_level();
      out_one_thread = out.bytes();
      gradient_one_thread = gradient_bytes;
    }
    CHECK(out.bytes() == out_one_thread);  // bit for bit, for any number of threads
    CHECK(gradient_bytes == gradient_one_thread);
  });
}

TEST_CASE("attention agrees with float64 in both directions") {
  for (const DType dtype : kComputingDTypes)
    for (const Size& size : kSizes) check_size(dtype, size);
}

TEST_CASE("attention of new tokens on a cache equals the last rows of the whole") {
  constexpr Size kWhole{1, 70, 70, 2, 2, 16};
  const auto context = Context::create();
  const Packed qkv(DType::F32, kWhole, Buffer::normal(Packed::elements(kWhole), 3));
  const Buffer whole(DType::F32, {1, 70, 2, 16}), last(DType::F32, {1, 1, 2, 16});
  attention_forward(*context, {qkv.q(), qkv.k(), qkv.v(), whole.view(), {}, kScale});
  TensorView q = qkv.q();
  q.data = static_cast<float*>(q.data) + 69 * q.strides[1];
  q.shape = {1, 1, 2, 16};
  attention_forward(*context, {q, qkv.k(), qkv.v(), last.view(), {}, kScale});
  const auto all = whole.values();
  check_close(last.values(), {all.end() - 32, all.end()}, tolerance(DType::F32), 1.0);
}

TEST_CASE("attention with scores far apart stays finite and picks the largest") {
  constexpr Size kSize{1, 3, 3, 1, 1, 1};
  const auto context = Context::create();
  // q = 1; keys -1000, 1000, 0; values 1, 2, 3; scale 0.375
  const Packed qkv(DType::F32, kSize, {1, -1000, 1, 1, 1000, 2, 1, 0, 3});
  const Buffer out(DType::F32, {1, 3, 1, 1}), log_sum_exp(DType::F32, {1, 1, 3});
  attention_forward(*context, {qkv.q(), qkv.k(), qkv.v(), out.view(), log_sum_exp.view(), kScale});
  check_close(out.values(), {1, 2, 2}, 1e-6);
  check_close(log_sum_exp.values(), {-375, 375, 375}, 1e-6);
}

TEST_CASE("attention_backward skips gradients that nobody wants") {
  constexpr Size kSize{1, 5, 5, 2, 1, 4};
  const auto context = Context::create();
  const Packed qkv(DType::F32, kSize, Buffer::normal(Packed::elements(kSize), 4));
  const Packed all(DType::F32, kSize, Buffer::normal(Packed::elements(kSize), 5));
  const Packed some(
      DType::F32, kSize,
      std::vector<double>(static_cast<std::size_t>(Packed::elements(kSize)), kBefore));
  const Buffer out(DType::F32, {1, 5, 2, 4}), log_sum_exp(DType::F32, {1, 2, 5});
  const Buffer grad_out(DType::F32, {1, 5, 2, 4}, Buffer::normal(40, 6));
  attention_forward(*context, {qkv.q(), qkv.k(), qkv.v(), out.view(), log_sum_exp.view(), kScale});
  AttentionBackward args{qkv.q(),
                         qkv.k(),
                         qkv.v(),
                         out.view(),
                         log_sum_exp.view(),
                         grad_out.view(),
                         {all.q(), false, true},
                         {all.k(), false, true},
                         {all.v(), false, true},
                         kScale};
  attention_backward(*context, args);
  args.grad_q = {};
  args.grad_k = {some.k(), false, true};
  args.grad_v = {};
  attention_backward(*context, args);
  const auto want = all.buffer().values(), got = some.buffer().values();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool is_k = i % 16 >= 8 && i % 16 < 12;
    CHECK(got[i] == (is_k ? want[i] : kBefore));
  }
}

TEST_CASE("attention refuses arguments that don't fit") {
  const auto context = Context::create();
  const Buffer q(DType::F32, {1, 2, 3, 4}), k(DType::F32, {1, 2, 1, 4}),
      v(DType::F32, {1, 2, 1, 4}), out(DType::F32, {1, 2, 3, 4});
  const AttentionForward good{q.view(), k.view(), v.view(), out.view()};
  CHECK_NOTHROW(attention_forward(*context, good));
  AttentionForward args = good;
  const Buffer two_heads(DType::F32, {1, 2, 2, 4});
  args.k = args.v = two_heads.view();
  CHECK_THROWS_WITH_AS(attention_forward(*context, args),
                       "attention_forward: the 3 heads of q must be a multiple of the 2 heads of k",
                       InvalidArgument);
  args = good;
  const Buffer one_key(DType::F32, {1, 1, 1, 4});
  args.k = args.v = one_key.view();
  CHECK_THROWS_WITH_AS(attention_forward(*context, args),
                       "attention_forward: there must be at least as many keys as queries, got 1 "
                       "keys, 2 queries",
                       InvalidArgument);
  args = good;
  args.v = q.view();
  CHECK_THROWS_AS(attention_forward(*context, args), InvalidArgument);
  args = good;
  args.q.strides = {24, 12, 1, 3};
  CHECK_THROWS_AS(attention_forward(*context, args), InvalidArgument);
  args = good;
  args.log_sum_exp = out.view();
  CHECK_THROWS_AS(attention_forward(*context, args), InvalidArgument);
  args = good;
  args.q.dtype = DType::F16;
  CHECK_THROWS_AS(attention_forward(*context, args), Unsupported);

  const Buffer log_sum_exp(DType::F32, {1, 3, 2}), wrong(DType::F32, {1, 2, 3, 5});
  AttentionBackward backward{q.view(),   k.view(), v.view(), out.view(), log_sum_exp.view(),
                             out.view(), {},       {},       {}};
  CHECK_NOTHROW(attention_backward(*context, backward));
  backward.grad_q = wrong.gradient(false);
  CHECK_THROWS_WITH_AS(attention_backward(*context, backward),
                       "attention_backward: grad_q must have shape [1, 2, 3, 4], got [1, 2, 3, 5]",
                       InvalidArgument);
  backward.grad_q = {};
  backward.log_sum_exp = {};
  CHECK_THROWS_AS(attention_backward(*context, backward), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
