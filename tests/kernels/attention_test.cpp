#include "kernels/attention.h"

#include <optional>

#include "tests/kernels/kernel_support.h"
#include "tests/support/paths.h"

namespace tessera::test {
namespace {

using kernels::attention_backward;
using kernels::attention_forward;
using kernels::AttentionBackward;
using kernels::AttentionForward;

struct Size {
  std::int64_t batch, queries, keys, heads, kv_heads, dim;
};
constexpr Size kSizes[] = {{1, 1, 1, 1, 1, 1},     {2, 33, 33, 2, 1, 3},   {1, 31, 31, 3, 3, 33},
                           {1, 1, 33, 4, 2, 64},   {2, 3, 67, 2, 2, 31},   {1, 64, 64, 2, 2, 32},
                           {1, 40, 97, 4, 2, 5},   {1, 130, 130, 1, 1, 8}, {3, 3, 3, 1, 1, 3},
                           {1, 257, 257, 1, 1, 3}, {2, 3, 70, 10, 5, 9}};
constexpr Size kLongSizes[] = {
    {1, 150, 150, 4, 2, 16}, {1, 70, 200, 2, 1, 64}, {2, 64, 65, 4, 4, 16}};
// All compiled head dims, and some that are padded to them.
constexpr std::int64_t kDims[] = {24, 104, 128, 251, 256};
constexpr std::int64_t kMoreDims[] = {72, 96, 160, 192};  // bf16 only
constexpr float kScale = 0.375F;
constexpr double kBefore = 0.5;

/// Larger widths give larger scores, with larger rounding errors.
float scale_of(const Size& s) { return s.dim > 64 ? kScale / 3 : kScale; }

/// q, k and v as views of one buffer [B, T, (H + 2 Hkv) D], as from a fused projection, `shift`
/// elements into it. q has the first `queries` tokens.
class Packed {
 public:
  Packed(DType dtype, const Size& s, std::vector<double> values, std::int64_t shift = 0)
      : size_(s), shift_(shift), buffer_(dtype, {shift + elements(s)}) {
    values.insert(values.begin(), static_cast<std::size_t>(shift), 0.0);
    buffer_.set(values);
  }
  static std::int64_t width(const Size& s) { return (s.heads + 2 * s.kv_heads) * s.dim; }
  static std::int64_t elements(const Size& s) { return s.batch * s.keys * width(s); }

  TensorView q() const { return window(0, size_.queries, size_.heads); }
  TensorView k() const { return window(size_.heads, size_.keys, size_.kv_heads); }
  TensorView v() const { return window(size_.heads + size_.kv_heads, size_.keys, size_.kv_heads); }
  std::vector<double> values() const {
    const auto all = buffer_.values();
    return {all.begin() + shift_, all.end()};
  }
  const std::vector<char>& bytes() const { return buffer_.bytes(); }

 private:
  TensorView window(std::int64_t first_head, std::int64_t tokens, std::int64_t heads) const {
    const std::int64_t stride = width(size_);
    return {offset(buffer_.view(), shift_ + first_head * size_.dim).data,
            buffer_.view().dtype,
            {size_.batch, tokens, heads, size_.dim},
            {size_.keys * stride, stride, size_.dim, 1},
            buffer_.view().device};
  }
  Size size_;
  std::int64_t shift_;
  Buffer buffer_;
};

/// Reference in float64: out, log_sum_exp and, given grad_out, the packed gradient.
struct Expected {
  Expected(const Size& s, const std::vector<double>& qkv, const std::vector<double>& grad_out)
      : out(at(s.batch * s.queries * s.heads * s.dim)),
        log_sum_exp(at(s.batch * s.heads * s.queries)),
        gradient(qkv.size(), 0.0) {
    const auto scale = static_cast<double>(scale_of(s));
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
            p[at(j)] = score * scale;
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
            const double grad_score = p[at(j)] * (grad_p[at(j)] - delta) * scale;
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

/// @param shift  elements before each operand; 1 misaligns all of them
void check_size(DType dtype, const Size& s, std::int64_t shift = 0) {
  CAPTURE(dtype_name(dtype));
  CAPTURE(s.queries);
  CAPTURE(s.keys);
  CAPTURE(s.dim);
  const Shape out_shape = {s.batch, s.queries, s.heads, s.dim};
  std::vector<double> qkv_values = Buffer::normal(Packed::elements(s), 1);
  std::vector<double> grad_out_values = Buffer::normal(numel(out_shape), 2);
  qkv_values = Buffer(dtype, {Packed::elements(s)}, qkv_values).values();  // rounded to the dtype
  grad_out_values = Buffer(dtype, {numel(out_shape)}, grad_out_values).values();
  const Expected expected(s, qkv_values, grad_out_values);
  // bf16: backward reads a rounded out, so a score's gradient has the rounding error of a sum over
  // dim.
  const double magnitude =
      dtype == DType::BF16 ? 4.0 + std::sqrt(static_cast<double>(s.dim)) : 10.0;
  std::optional<CpuLevel> level;
  std::vector<char> out_one_thread, gradient_one_thread;
  for_each_context([&](Context& context) {
    const bool on_cpu = context.device().type == DeviceType::CPU;
    const Packed qkv(dtype, s, qkv_values, shift);
    auto shifted_grad_out = grad_out_values;
    shifted_grad_out.insert(shifted_grad_out.begin(), static_cast<std::size_t>(shift), 0.0);
    const Shape shifted_shape = {shift + numel(out_shape)};
    const Buffer grad_out(dtype, shifted_shape, shifted_grad_out), out(dtype, shifted_shape);
    const auto behind = [&](const Buffer& buffer) {
      return dense_view(offset(buffer.view(), shift).data, dtype, out_shape, context.device());
    };
    const Buffer log_sum_exp(accumulator_dtype(dtype), {s.batch, s.heads, s.queries});
    attention_forward(context,
                      {qkv.q(), qkv.k(), qkv.v(), behind(out), log_sum_exp.view(), scale_of(s)});
    // Tensor cores and AVX512-BF16 also round the weights of bf16 values to bf16.
    const double out_magnitude = dtype != DType::BF16                            ? 10.0
                                 : !on_cpu || rounds_weights(context, s.queries) ? 1.0
                                                                                 : 0.01;
    const auto out_values = out.values();
    check_close({out_values.begin() + shift, out_values.end()}, expected.out, tolerance(dtype),
                out_magnitude);
    check_close(log_sum_exp.values(), expected.log_sum_exp, tolerance(accumulator_dtype(dtype)),
                10.0);

    std::vector<char> gradient_bytes;
    for (const bool accumulate : {false, true}) {
      const std::vector<double> before(static_cast<std::size_t>(Packed::elements(s)), kBefore);
      const Packed gradient(dtype, s, before, shift), apart(dtype, s, before, shift);
      AttentionBackward args{qkv.q(),
                             qkv.k(),
                             qkv.v(),
                             behind(out),
                             log_sum_exp.view(),
                             behind(grad_out),
                             {gradient.q(), accumulate, true},
                             {gradient.k(), accumulate, true},
                             {gradient.v(), accumulate, true},
                             scale_of(s)};
      attention_backward(context, args);
      // Requests one gradient at a time; writing an unrequested one would accumulate twice.
      for (int wanted = 0; accumulate && s.keys <= 40 && wanted < 3; ++wanted) {
        args.grad_q = {apart.q(), true, wanted == 0};
        args.grad_k = {apart.k(), true, wanted == 1};
        args.grad_v = {apart.v(), true, wanted == 2};
        attention_backward(context, args);
        if (wanted == 2) CHECK(apart.bytes() == gradient.bytes());
      }
      auto want = expected.gradient;
      for (std::size_t i = 0; i < want.size(); ++i) {
        const auto width = static_cast<std::size_t>(Packed::width(s));
        const bool past_queries =
            i % width < static_cast<std::size_t>(s.heads * s.dim) &&
            i / width % static_cast<std::size_t>(s.keys) >= static_cast<std::size_t>(s.queries);
        if (accumulate || past_queries) want[i] += kBefore;
      }
      check_close(gradient.values(), want, tolerance(dtype), magnitude);
      gradient_bytes = gradient.bytes();
    }
    if (!on_cpu) return;
    if (level != context.cpu_level()) {
      level = context.cpu_level();
      out_one_thread = out.bytes();
      gradient_one_thread = gradient_bytes;
    }
    CHECK(out.bytes() == out_one_thread);
    CHECK(gradient_bytes == gradient_one_thread);
  });
}

TEST_CASE("attention matches float64 in both directions") {
  for (const DType dtype : kComputingDTypes)
    for (const Size& size : kSizes) check_size(dtype, size);
}

TEST_CASE("attention matches float64 over several tiles, and for misaligned operands") {
  for (const DType dtype : kComputingDTypes) {
    for (const Size& size : kLongSizes) check_size(dtype, size);
    check_size(dtype, {1, 20, 40, 2, 1, 32}, 1);
  }
}

TEST_CASE("attention matches float64 for all head dims") {
  for (const DType dtype : kComputingDTypes)
    for (const std::int64_t dim : kDims) check_size(dtype, {1, 19, 37, 2, 1, dim});
  for (const std::int64_t dim : kMoreDims) check_size(DType::BF16, {1, 19, 37, 2, 1, dim});
}

TEST_CASE("attention with extreme scores stays finite and picks the largest") {
  constexpr Size kSize{1, 3, 3, 1, 1, 1};
  for_each_context([&](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      // q = 1; keys -1024, 1024, 0; values 1, 2, 3; scale 0.375
      const Packed qkv(dtype, kSize, {1, -1024, 1, 1, 1024, 2, 1, 0, 3});
      const Buffer out(dtype, {1, 3, 1, 1}), log_sum_exp(accumulator_dtype(dtype), {1, 1, 3});
      attention_forward(context,
                        {qkv.q(), qkv.k(), qkv.v(), out.view(), log_sum_exp.view(), kScale});
      check_close(out.values(), {1, 2, 2}, 1e-6);
      check_close(log_sum_exp.values(), {-384, 384, 384}, 1e-6);
    }
  });
}

TEST_CASE("attention_backward without queries zeroes the gradients of keys and values") {
  for_each_context([&](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      const Buffer none(dtype, {1, 0, 2, 8});
      const TensorView log_sum_exp{
          nullptr, accumulator_dtype(dtype), {1, 2, 0}, {0, 0, 1}, context.device()};
      const Buffer k(dtype, {1, 5, 1, 8}, 1.0), v(dtype, {1, 5, 1, 8}, 1.0);
      const Buffer grad_k(dtype, {1, 5, 1, 8}, kBefore), grad_v(dtype, {1, 5, 1, 8}, kBefore);
      attention_backward(
          context, {none.view(), k.view(), v.view(), none.view(), log_sum_exp, none.view(),
                    none.gradient(false), grad_k.gradient(false), grad_v.gradient(true), kScale});
      CHECK(grad_k.values() == std::vector<double>(40, 0.0));
      CHECK(grad_v.values() == std::vector<double>(40, kBefore));
    }
  });
}

TEST_CASE("attention on CUDA refuses unsupported head dims") {
  for_each_context([&](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      const Buffer x(dtype, {1, 1, 1, 257}, 1.0), out(dtype, {1, 1, 1, 257});
      const Buffer log_sum_exp(accumulator_dtype(dtype), {1, 1, 1});
      const AttentionForward forward{x.view(), x.view(), x.view(), out.view(), log_sum_exp.view()};
      const AttentionBackward backward{x.view(), x.view(), x.view(), out.view(), log_sum_exp.view(),
                                       x.view(), {},       {},       {}};
      if (context.device().type == DeviceType::CPU) {
        CHECK_NOTHROW(attention_forward(context, forward));
        CHECK_NOTHROW(attention_backward(context, backward));
        continue;
      }
      CHECK_THROWS_WITH_AS(attention_forward(context, forward),
                           "attention_forward: a head_dim of 257 is more than the 256 that it "
                           "takes on CUDA",
                           Unsupported);
      CHECK_THROWS_AS(attention_backward(context, backward), Unsupported);
    }
  });
}

TEST_CASE("if wide heads exceed shared memory in backward, forward already refuses them") {
  if (gpu_only()) return;
  REQUIRE(::setenv("TESSERA_FIBER_SHARED", "101376", 1) == 0);  // an RTX 4090's 99 KiB
  with_plugin(fiber_plugin(), [](Context& context) {
    for (const std::int64_t dim : {192, 193, 256}) {
      CAPTURE(dim);
      const Buffer x(DType::BF16, {1, 1, 1, dim}, 1.0), out(DType::BF16, {1, 1, 1, dim});
      const Buffer log_sum_exp(DType::F32, {1, 1, 1}), gradient(DType::BF16, {1, 1, 1, dim});
      const AttentionForward only{x.view(), x.view(), x.view(), out.view()};
      CHECK_NOTHROW(attention_forward(context, only));
      AttentionForward forward = only;
      forward.log_sum_exp = log_sum_exp.view();
      const AttentionBackward backward{x.view(),
                                       x.view(),
                                       x.view(),
                                       out.view(),
                                       log_sum_exp.view(),
                                       x.view(),
                                       {gradient.view(), false, true},
                                       {gradient.view(), true, true},
                                       {gradient.view(), true, true}};
      if (dim <= 192) {
        CHECK_NOTHROW(attention_forward(context, forward));
        CHECK_NOTHROW(attention_backward(context, backward));
        continue;
      }
      const std::string why =
          "the gradients of a head_dim of " + std::to_string(dim) +
          " in bf16 take 131584 bytes of shared memory in a block, more than the 101376 of this "
          "GPU; raise model.n_head, train with --train.precision fp32, or build with cuDNN "
          "(tools/setup.sh --cuda)";
      CHECK_THROWS_WITH_AS(attention_forward(context, forward),
                           ("attention_forward: " + why).c_str(), Unsupported);
      CHECK_THROWS_WITH_AS(attention_backward(context, backward),
                           ("attention_backward: " + why).c_str(), Unsupported);
    }
    const Buffer x(DType::F32, {1, 1, 1, 256}, 1.0), out(DType::F32, {1, 1, 1, 256});
    const Buffer log_sum_exp(DType::F32, {1, 1, 1});
    CHECK_NOTHROW(
        attention_forward(context, {x.view(), x.view(), x.view(), out.view(), log_sum_exp.view()}));
  });
  REQUIRE(::unsetenv("TESSERA_FIBER_SHARED") == 0);
}

TEST_CASE("a plan books cuDNN's workspace: in slices, and less if gradients need not repeat") {
  const auto bytes = [](std::int64_t batch, std::int64_t heads, std::int64_t tokens,
                        std::int64_t dim, bool deterministic) {
    const auto context =
        Context::create({.device = {DeviceType::Meta, 0}, .planned = {DeviceType::CUDA, 0}});
    context->set_deterministic(deterministic);
    const TensorView x =
        dense_view(nullptr, DType::BF16, {batch, tokens, heads, dim}, context->device());
    const TensorView sums =
        dense_view(nullptr, DType::F32, {batch, heads, tokens}, context->device());
    const GradientView gradient{x, false, true};
    attention_backward(*context, {x, x, x, x, sums, x, gradient, gradient, gradient});
    const auto& libraries = context->planned_libraries();
    const auto found = libraries.find("cuDNN attention");
    return found == libraries.end() ? 0 : found->second;
  };
  CHECK(bytes(64, 12, 1024, 64, true) == std::int64_t{32} * 12 * 1024 * (2 * 1024 + 4) + 256);
  CHECK(bytes(64, 12, 1024, 64, false) == std::int64_t{64} * 12 * 1024 * (4 * 64 + 4) + 256);
  CHECK(bytes(4, 32, 4096, 128, true) == std::int64_t{32} * 4096 * (2 * 4096 + 4) + 256);
  CHECK(bytes(1, 64, 8192, 128, true) == 0);  // tessera's own kernel
}

}  // namespace
}  // namespace tessera::test
