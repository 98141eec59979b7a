#include "core/ops/attention.h"

#include <array>
#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/attention.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"

namespace tessera::ops {
namespace {

constexpr std::string_view kAttention = "attention";
constexpr std::string_view kCached = "cached_attention";

// A packed projection, or queries, keys and values.
using Inputs = std::vector<Tensor>;

struct Sizes {
  std::int64_t batch, queries, keys, heads, kv_heads, head_dim;
  Shape out_shape() const { return {batch, queries, heads * head_dim}; }
};

Sizes check_packed(std::string_view operation, const Tensor& qkv, const AttentionOptions& options) {
  check_dims(operation, "qkv", qkv, 3, "[B, T, (H + 2 * Hkv) * D]");
  check_rows(operation, "qkv", qkv);
  const std::int64_t width = qkv.dim(2), heads = options.heads;
  const std::int64_t kv_heads = options.kv_heads == 0 ? heads : options.kv_heads;
  const bool fits = heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0 && heads <= width &&
                    width % (heads + 2 * kv_heads) == 0;
  require(fits,
          "{}: the last dim of qkv must be (heads + 2 * kv_heads) * head_dim with heads a multiple "
          "of kv_heads, got shape {} with heads {} and kv_heads {}",
          operation, qkv.shape(), heads, kv_heads);
  return {qkv.dim(0), qkv.dim(1), qkv.dim(1), heads, kv_heads, width / (heads + 2 * kv_heads)};
}

Sizes check_separate(std::string_view operation, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOptions& options) {
  check_dims(operation, "q", q, 4, "[B, T, H, D]");
  check_rows(operation, "q", q);
  check_dims(operation, "k", k, 4, "[B, S, Hkv, D]");
  const Sizes s{q.dim(0), q.dim(1), k.dim(1), q.dim(2), k.dim(2), q.dim(3)};
  check_dense(operation, "k", k, q.dtype(), {s.batch, s.keys, s.kv_heads, s.head_dim});
  check_dense(operation, "v", v, q.dtype(), k.shape());
  require(s.head_dim > 0 && s.kv_heads > 0 && s.heads > 0 && s.heads % s.kv_heads == 0,
          "{}: the heads of q must be a multiple of those of k, got q of shape {} and k of shape "
          "{}",
          operation, q.shape(), k.shape());
  const auto agrees = [](std::int64_t given, std::int64_t found) {
    return given == 0 || given == found;
  };
  require(agrees(options.heads, s.heads) && agrees(options.kv_heads, s.kv_heads),
          "{}: q of shape {} and k of shape {} do not have heads {} and kv_heads {}", operation,
          q.shape(), k.shape(), options.heads, options.kv_heads);
  return s;
}

void check_options(std::string_view operation, const AttentionOptions& options, const Sizes& s) {
  require(options.window >= 0 && (options.window == 0 || options.causal),
          "{}: window must be 0, or positive with causal, got window {} with causal {}", operation,
          options.window, options.causal);
  const auto softcap = static_cast<float>(options.softcap);
  require(options.softcap == 0.0 || (softcap > 0.0F && std::isfinite(softcap)),
          "{}: softcap must be 0, or positive and finite in f32, got {}", operation,
          options.softcap);
  const auto scale = static_cast<float>(options.scale);
  require(options.scale == 0.0 || (scale > 0.0F && std::isfinite(scale)),
          "{}: scale must be 0, or positive and finite in f32, got {}", operation, options.scale);
  const Tensor& documents = options.documents;
  if (documents.defined())
    check_dense(operation, "documents", documents, DType::I32, {s.batch, s.keys});
  const bool positions = options.causal || documents.defined();
  require(s.keys >= s.queries || !positions,
          "{}: {} queries need at least as many keys with causal or documents, got {}", operation,
          s.queries, s.keys);
  require(s.keys > 0 || s.queries == 0, "{}: {} queries need at least one key, got none", operation,
          s.queries);
}

float scale_of(const AttentionOptions& options, const Sizes& s) {
  return options.scale == 0.0 ? 1.0F / std::sqrt(static_cast<float>(s.head_dim))
                              : static_cast<float>(options.scale);
}

// The caller adds the documents, which backward reads from a saved tensor.
kernels::AttentionVariant variant_of(const AttentionOptions& options, std::int64_t keys) {
  return {options.causal, options.window < keys ? options.window : 0,
          static_cast<float>(options.softcap), TensorView{}};
}

// Queries, keys and values as [B, T, heads, D].
std::array<TensorView, 3> split(const std::vector<TensorView>& inputs, const Sizes& s) {
  if (inputs.size() == 3) return {inputs[0], inputs[1], inputs[2]};
  const TensorView& packed = inputs[0];
  const std::int64_t row = (s.heads + 2 * s.kv_heads) * s.head_dim;
  const auto part = [&](std::int64_t first_head, std::int64_t heads) -> TensorView {
    return {packed.at(first_head * s.head_dim),
            packed.dtype,
            {s.batch, s.queries, heads, s.head_dim},
            {s.queries * row, row, s.head_dim, 1},
            packed.device};
  };
  return {part(0, s.heads), part(s.heads, s.kv_heads), part(s.heads + s.kv_heads, s.kv_heads)};
}

std::array<TensorView, 3> split(const Inputs& inputs, const Sizes& s) {
  std::vector<TensorView> views;
  for (const Tensor& input : inputs) views.push_back(input.view());
  return split(views, s);
}

// The gradients of queries, keys and values.
std::array<GradientView, 3> split_gradients(autograd::InputGradients& into, std::size_t inputs,
                                            const Sizes& s) {
  if (inputs == 3) return {into.target(0), into.target(1), into.target(2)};
  const GradientView packed = into.target(0);
  if (!packed) return {};
  const auto views = split(std::vector<TensorView>{packed.view}, s);
  std::array<GradientView, 3> parts;
  for (std::size_t i = 0; i < 3; ++i) parts[i] = {views[i], packed.accumulate, true};
  return parts;
}

TensorView split_heads(const TensorView& x, const Sizes& s) {
  return dense_view(x.data, x.dtype, {s.batch, s.queries, s.heads, s.head_dim}, x.device);
}

autograd::Backward backward_of(const Inputs& inputs, const Tensor& out, const Tensor& log_sum_exp,
                               const AttentionOptions& options, const Sizes& s) {
  using autograd::SavedTensor;
  std::vector<SavedTensor> saved;
  for (const Tensor& input : inputs) saved.emplace_back(input);
  const SavedTensor documents =
      options.documents.defined() ? SavedTensor(options.documents) : SavedTensor();
  return [saved, saved_out = SavedTensor(out), documents, log_sum_exp,
          variant = variant_of(options, s.keys), scale = scale_of(options, s),
          s](const Tensor& grad_out, autograd::InputGradients& into) {
    const auto grads = split_gradients(into, saved.size(), s);
    if (!grads[0] && !grads[1] && !grads[2]) return;
    Inputs given;
    for (const SavedTensor& input : saved) given.push_back(input.get(kAttention));
    const auto [q, k, v] = split(given, s);
    kernels::AttentionBackward args{q,
                                    k,
                                    v,
                                    split_heads(saved_out.get(kAttention).view(), s),
                                    log_sum_exp.view(),
                                    split_heads(grad_out.view(), s),
                                    grads[0],
                                    grads[1],
                                    grads[2],
                                    scale,
                                    variant};
    if (documents.defined()) args.variant.documents = documents.get(kAttention).view();
    kernels::attention_backward(*grad_out.context(), args);
  };
}

Tensor attend(const std::shared_ptr<Context>& context, const Inputs& inputs, const Sizes& s,
              const AttentionOptions& options) {
  check_options(kAttention, options, s);
  const DType dtype = inputs[0].dtype();
  Tensor out =
      Tensor::empty(context, s.out_shape(), dtype, MemoryCategory::Activations, kAttention);
  const auto [q, k, v] = split(inputs, s);
  kernels::AttentionForward args{q, k, v, split_heads(out.view(), s)};
  args.scale = scale_of(options, s);
  args.variant = variant_of(options, s.keys);
  if (options.documents.defined()) args.variant.documents = options.documents.view();

  const bool recorded = inputs.size() == 1
                            ? autograd::needs_grad({&inputs[0]})
                            : autograd::needs_grad({&inputs[0], &inputs[1], &inputs[2]});
  if (!recorded) {
    kernels::attention_forward(*context, args);
    return out;
  }
  const Tensor log_sum_exp =
      Tensor::empty(context, {s.batch, s.heads, s.queries}, kernels::accumulator_dtype(dtype),
                    MemoryCategory::Activations, kAttention);
  args.log_sum_exp = log_sum_exp.view();
  kernels::attention_forward(*context, args);
  autograd::record(kAttention, out, inputs, backward_of(inputs, out, log_sum_exp, options, s));
  return out;
}

}  // namespace

Tensor attention(const Tensor& qkv, const AttentionOptions& options) {
  const auto& context = common_context(kAttention, {&qkv, &options.documents});
  return attend(context, {qkv}, check_packed(kAttention, qkv, options), options);
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options) {
  const auto& context = common_context(kAttention, {&q, &k, &v, &options.documents});
  return attend(context, {q, k, v}, check_separate(kAttention, q, k, v, options), options);
}

namespace {

void check_cache(std::string_view argument, const Tensor& cache, DType dtype, const Sizes& s,
                 std::int64_t past) {
  check_dims(kCached, argument, cache, 4, "[B, P, Hkv, D]");
  check_dense(kCached, argument, cache, dtype, {s.batch, cache.dim(1), s.kv_heads, s.head_dim});
  require(past >= 0 && s.queries <= cache.dim(1) && past <= cache.dim(1) - s.queries,
          "{}: {} past and {} new tokens do not fit into {} of shape {}; make a longer cache",
          kCached, past, s.queries, argument, cache.shape());
}

// Writes new keys or values [B, T, Hkv, D] to positions [past, past + T) of the cache.
void append(Context& context, const TensorView& heads, const Tensor& cache, std::int64_t past) {
  const TensorView to = cache.view().narrow(1, past, heads.shape[1]);
  const Shape rows{heads.shape[1], heads.shape[2] * heads.shape[3]};
  for (std::int64_t b = 0; b < heads.shape[0]; ++b)
    kernels::cast(
        context,
        {heads.at(b * heads.strides[0]), heads.dtype, rows, {heads.strides[1], 1}, heads.device},
        {dense_view(to.at(b * to.strides[0]), to.dtype, rows, to.device), false, true});
  cache.storage()->bump_version();
}

Tensor attend_cached(const std::shared_ptr<Context>& context, const Inputs& inputs, const Sizes& s,
                     const AttentionOptions& options, const Tensor& cache_k, const Tensor& cache_v,
                     std::int64_t past) {
  check_cache("cache_k", cache_k, inputs[0].dtype(), s, past);
  check_cache("cache_v", cache_v, inputs[0].dtype(), s, past);
  require(cache_k.shape() == cache_v.shape(), "{}: cache_k has shape {}, cache_v {}", kCached,
          cache_k.shape(), cache_v.shape());
  require(options.causal, "{}: causal must be true, because the cache holds earlier tokens alone",
          kCached);
  Sizes cached = s;
  cached.keys = past + s.queries;
  check_options(kCached, options, cached);
  for (const Tensor& input : inputs)
    require<Unsupported>(!autograd::needs_grad({&input}),
                         "{} has no gradient; decode under NoGradGuard, train with attention",
                         kCached);

  Tensor out = Tensor::empty(context, s.out_shape(), inputs[0].dtype(), MemoryCategory::Activations,
                             kCached);
  const auto [q, k, v] = split(inputs, s);
  append(*context, k, cache_k, past);
  append(*context, v, cache_v, past);

  // Keys before the window of the first new token are dropped.
  const std::int64_t first =
      options.window > 0 ? std::max<std::int64_t>(0, past - options.window + 1) : 0;
  const std::int64_t keys = cached.keys - first;
  kernels::AttentionForward args{q, cache_k.view().narrow(1, first, keys),
                                 cache_v.view().narrow(1, first, keys), split_heads(out.view(), s)};
  args.scale = scale_of(options, s);
  args.variant = variant_of(options, keys);
  if (options.documents.defined())
    args.variant.documents = options.documents.view().narrow(1, first, keys);
  kernels::attention_forward(*context, args);
  return out;
}

}  // namespace

Tensor cached_attention(const Tensor& qkv, const AttentionOptions& options, const Tensor& cache_k,
                        const Tensor& cache_v, std::int64_t past) {
  const auto& context = common_context(kCached, {&qkv, &cache_k, &cache_v, &options.documents});
  return attend_cached(context, {qkv}, check_packed(kCached, qkv, options), options, cache_k,
                       cache_v, past);
}

Tensor cached_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionOptions& options, const Tensor& cache_k,
                        const Tensor& cache_v, std::int64_t past) {
  const auto& context =
      common_context(kCached, {&q, &k, &v, &cache_k, &cache_v, &options.documents});
  const Sizes sizes = check_separate(kCached, q, k, v, options);
  require(k.dim(1) == q.dim(1), "{}: q has shape {}, k {}; give the new tokens alone", kCached,
          q.shape(), k.shape());
  return attend_cached(context, {q, k, v}, sizes, options, cache_k, cache_v, past);
}

}  // namespace tessera::ops
