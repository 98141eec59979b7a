#include "kernels/attention.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {
namespace {

void check_heads(std::string_view kernel, std::string_view name, const Context& context,
                 const TensorView& view, DType dtype) {
  check_device(kernel, name, context, view);
  check_dtype(kernel, name, view, dtype);
  require(view.shape.size() == 4, "{}: {} must have 4 dims [B, T, H, D], got shape {}", kernel,
          name, view.shape);
  require(view.shape[3] <= 1 || view.strides[3] == 1,
          "{}: the last dim of {} must be contiguous, got shape {} with strides {}", kernel, name,
          view.shape, view.strides);
}

void check_inputs(std::string_view kernel, const Context& context, const TensorView& q,
                  const TensorView& k, const TensorView& v, const TensorView& out) {
  require<Unsupported>(q.dtype == DType::F64 || q.dtype == DType::F32 || q.dtype == DType::BF16,
                       "{} is not available for dtype {}; use f32, bf16 or f64", kernel, q.dtype);
  check_heads(kernel, "q", context, q, q.dtype);
  check_heads(kernel, "k", context, k, q.dtype);
  check_heads(kernel, "v", context, v, q.dtype);
  check_heads(kernel, "out", context, out, q.dtype);
  const std::int64_t heads = q.shape[2];
  const std::int64_t kv_heads = k.shape[2];
  require(kv_heads >= 1 && heads % kv_heads == 0,
          "{}: the {} heads of q must be a multiple of the {} heads of k", kernel, heads, kv_heads);
  require(k.shape[1] >= q.shape[1],
          "{}: there must be at least as many keys as queries, got {} keys, {} queries", kernel,
          k.shape[1], q.shape[1]);
  check_shape(kernel, "k", k, {q.shape[0], k.shape[1], kv_heads, q.shape[3]});
  check_shape(kernel, "v", v, k.shape);
  check_shape(kernel, "out", out, q.shape);
}

void check_log_sum_exp(std::string_view kernel, const Context& context, const TensorView& view,
                       const TensorView& q) {
  check_device(kernel, "log_sum_exp", context, view);
  check_dtype(kernel, "log_sum_exp", view, accumulator_dtype(q.dtype));
  check_shape(kernel, "log_sum_exp", view, {q.shape[0], q.shape[2], q.shape[1]});
  check_contiguous(kernel, "log_sum_exp", view);
}

void check_gradient(std::string_view name, const Context& context, const GradientView& gradient,
                    const TensorView& like) {
  if (!gradient) return;
  check_heads("attention_backward", name, context, gradient.view, like.dtype);
  check_shape("attention_backward", name, gradient.view, like.shape);
}

}  // namespace

TESSERA_CPU_KERNEL(attention_forward, AttentionForward)
TESSERA_CPU_KERNEL(attention_backward, AttentionBackward)

void attention_forward(Context& context, const AttentionForward& args) {
  check_inputs("attention_forward", context, args.q, args.k, args.v, args.out);
  if (args.log_sum_exp.defined())
    check_log_sum_exp("attention_forward", context, args.log_sum_exp, args.q);
  if (args.q.numel() == 0) return;
  TESSERA_DISPATCH(attention_forward, context, args);
}

void attention_backward(Context& context, const AttentionBackward& args) {
  check_inputs("attention_backward", context, args.q, args.k, args.v, args.out);
  check_log_sum_exp("attention_backward", context, args.log_sum_exp, args.q);
  check_heads("attention_backward", "grad_out", context, args.grad_out, args.q.dtype);
  check_shape("attention_backward", "grad_out", args.grad_out, args.q.shape);
  check_gradient("grad_q", context, args.grad_q, args.q);
  check_gradient("grad_k", context, args.grad_k, args.k);
  check_gradient("grad_v", context, args.grad_v, args.v);
  if (args.k.numel() == 0) return;
  TESSERA_DISPATCH(attention_backward, context, args);
}

}  // namespace tessera::kernels
