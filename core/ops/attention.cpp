#include "core/ops/attention.h"

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/attention.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"

namespace tessera::ops {
namespace {

constexpr std::string_view kCausal = "causal_attention";
constexpr std::string_view kCached = "cached_attention";

// Sizes of a packed projection [B, T, 3 * H * D].
struct Heads {
  std::int64_t batch, time, heads, head_dim;
  std::int64_t width() const { return heads * head_dim; }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(head_dim)); }
};

Heads check_packed(std::string_view operation, const Tensor& qkv, std::int64_t n_head) {
  check_dims(operation, "qkv", qkv, 3, "[B, T, 3 * H * D]");
  check_rows(operation, "qkv", qkv);
  const std::int64_t packed = qkv.dim(2);
  require(n_head >= 1 && packed > 0 && packed % 3 == 0 && packed / 3 % n_head == 0,
          "{}: the last dim of qkv must be 3 * n_head * head_dim, got shape {} with n_head {}",
          operation, qkv.shape(), n_head);
  return {qkv.dim(0), qkv.dim(1), n_head, packed / 3 / n_head};
}

// Part 0, 1 or 2 (queries, keys, values) of a packed view, as [B, T, H, D].
TensorView part(const TensorView& packed, const Heads& s, int index) {
  const std::int64_t row = 3 * s.width();
  return {packed.at(index * s.width()),
          packed.dtype,
          {s.batch, s.time, s.heads, s.head_dim},
          {s.time * row, row, s.head_dim, 1},
          packed.device};
}

GradientView part(const GradientView& packed, const Heads& s, int index) {
  return {part(packed.view, s, index), packed.accumulate, true};
}

TensorView split_heads(const TensorView& x, const Heads& s) {
  return dense_view(x.data, x.dtype, {s.batch, s.time, s.heads, s.head_dim}, x.device);
}

}  // namespace

Tensor causal_attention(const Tensor& qkv, std::int64_t n_head) {
  const auto& context = common_context(kCausal, {&qkv});
  const Heads sizes = check_packed(kCausal, qkv, n_head);

  const bool recorded = autograd::needs_grad({&qkv});
  Tensor out = Tensor::empty(context, {sizes.batch, sizes.time, sizes.width()}, qkv.dtype(),
                             MemoryCategory::Activations, kCausal);
  Tensor log_sum_exp;
  const TensorView packed = qkv.view();
  kernels::AttentionForward args{part(packed, sizes, 0), part(packed, sizes, 1),
                                 part(packed, sizes, 2), split_heads(out.view(), sizes)};
  args.scale = sizes.scale();
  if (recorded) {
    log_sum_exp = Tensor::empty(context, {sizes.batch, n_head, sizes.time},
                                kernels::accumulator_dtype(qkv.dtype()),
                                MemoryCategory::Activations, kCausal);
    args.log_sum_exp = log_sum_exp.view();
  }
  kernels::attention_forward(*context, args);

  if (recorded) {
    using autograd::SavedTensor;
    const auto backward = [saved_qkv = SavedTensor(qkv), saved_out = SavedTensor(out), log_sum_exp,
                           sizes](const Tensor& grad_out, autograd::InputGradients& into) {
      const GradientView grad = into.target(0);
      if (!grad) return;
      const TensorView x = saved_qkv.get(kCausal).view();
      kernels::attention_backward(
          *grad_out.context(),
          {part(x, sizes, 0), part(x, sizes, 1), part(x, sizes, 2),
           split_heads(saved_out.get(kCausal).view(), sizes), log_sum_exp.view(),
           split_heads(grad_out.view(), sizes), part(grad, sizes, 0), part(grad, sizes, 1),
           part(grad, sizes, 2), sizes.scale()});
    };
    autograd::record(kCausal, out, {qkv}, backward);
  }
  return out;
}

namespace {

void check_cache(std::string_view argument, const Tensor& cache, const Tensor& qkv, const Heads& s,
                 std::int64_t past) {
  check_dims(kCached, argument, cache, 4, "[B, P, H, D]");
  check_dense(kCached, argument, cache, qkv.dtype(), {s.batch, cache.dim(1), s.heads, s.head_dim});
  require(past >= 0 && s.time <= cache.dim(1) && past <= cache.dim(1) - s.time,
          "{}: {} past and {} new tokens do not fit into {} of shape {}; make a longer cache",
          kCached, past, s.time, argument, cache.shape());
}

// Writes the new keys (index 1 of the packed q, k, v) or values (index 2) to positions
// [past, past + T) of the cache.
void append(Context& context, const TensorView& packed, const Heads& s, int index,
            const TensorView& cache, std::int64_t past) {
  const std::int64_t columns = cache.shape[1];
  const Shape rows{s.time, s.width()};
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int64_t from = b * s.time * 3 * s.width() + index * s.width();
    const std::int64_t to = (b * columns + past) * s.width();
    const TensorView in{packed.at(from), packed.dtype, rows, {3 * s.width(), 1}, packed.device};
    kernels::cast(context, in,
                  {dense_view(cache.at(to), cache.dtype, rows, cache.device), false, true});
  }
}

}  // namespace

Tensor cached_attention(const Tensor& qkv, std::int64_t n_head, const Tensor& cache_k,
                        const Tensor& cache_v, std::int64_t past) {
  const auto& context = common_context(kCached, {&qkv, &cache_k, &cache_v});
  const Heads sizes = check_packed(kCached, qkv, n_head);
  check_cache("cache_k", cache_k, qkv, sizes, past);
  check_cache("cache_v", cache_v, qkv, sizes, past);
  require(cache_k.shape() == cache_v.shape(), "{}: cache_k has shape {}, cache_v {}", kCached,
          cache_k.shape(), cache_v.shape());
  require<Unsupported>(!autograd::needs_grad({&qkv}),
                       "{} has no gradient; decode under NoGradGuard, train with causal_attention",
                       kCached);

  Tensor out = Tensor::empty(context, {sizes.batch, sizes.time, sizes.width()}, qkv.dtype(),
                             MemoryCategory::Activations, kCached);
  const TensorView packed = qkv.view();
  append(*context, packed, sizes, 1, cache_k.view(), past);
  append(*context, packed, sizes, 2, cache_v.view(), past);
  cache_k.storage()->bump_version();
  cache_v.storage()->bump_version();

  const std::int64_t filled = past + sizes.time;
  kernels::AttentionForward args{part(packed, sizes, 0), cache_k.view().narrow(1, 0, filled),
                                 cache_v.view().narrow(1, 0, filled),
                                 split_heads(out.view(), sizes)};
  args.scale = sizes.scale();
  kernels::attention_forward(*context, args);
  return out;
}

}  // namespace tessera::ops
