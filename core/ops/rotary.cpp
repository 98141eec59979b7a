#include "core/ops/rotary.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/rotary.h"

namespace tessera::ops {
namespace {

// x is [B, T, ...], where the remaining dims hold `heads` heads of equal width.
Tensor rotate(std::string_view operation, const Tensor& x, std::int64_t heads,
              std::int64_t copied_heads, const RotaryOptions& options,
              std::int64_t first_position) {
  const auto& context = common_context(operation, {&x});
  const std::int64_t head_dim = (x.shape().size() == 4 ? x.dim(2) * x.dim(3) : x.dim(2)) / heads;
  const Shape shape{x.dim(0), x.dim(1), heads, head_dim};
  constexpr std::int64_t kMostPositions = std::int64_t{1} << 31;  // f64 angles are exact to 1e-6
  require(first_position >= 0 && first_position <= kMostPositions - x.dim(1),
          "{}: positions [{}, {} + {}) must lie in [0, {})", operation, first_position,
          first_position, x.dim(1), kMostPositions);
  const auto by_heads = [shape](const TensorView& view) {
    return dense_view(view.data, view.dtype, shape, view.device);
  };

  Tensor y = Tensor::empty(context, x.shape(), x.dtype(), MemoryCategory::Activations, operation);
  kernels::Rotary args{.x = by_heads(x.view()),
                       .y = {by_heads(y.view()), false, true},
                       .angles = rotary_angles(options, head_dim, first_position + x.dim(1)),
                       .first_position = first_position,
                       .copied_heads = copied_heads};
  kernels::rotary(*context, args);

  if (autograd::needs_grad({&x})) {
    args.x = {};
    args.y = {};
    args.inverse = true;
    const auto backward = [args, by_heads](const Tensor& grad_y, autograd::InputGradients& into) {
      const GradientView grad = into.target(0);
      if (!grad) return;
      kernels::Rotary inverse = args;
      inverse.x = by_heads(grad_y.view());
      inverse.y = {by_heads(grad.view), grad.accumulate, true};
      kernels::rotary(*grad_y.context(), inverse);
    };
    autograd::record(operation, y, {x}, backward);
  }
  return y;
}

}  // namespace

Tensor rotary(const Tensor& x, const RotaryOptions& options, std::int64_t first_position) {
  check_dims("rotary", "x", x, 4, "[B, T, H, D]");
  check_rows("rotary", "x", x);
  require(x.dim(2) > 0, "rotary: x has no heads, got shape {}", x.shape());
  return rotate("rotary", x, x.dim(2), 0, options, first_position);
}

Tensor rotary_packed(const Tensor& qkv, std::int64_t n_head, std::int64_t n_kv_head,
                     const RotaryOptions& options, std::int64_t first_position) {
  check_dims("rotary_packed", "qkv", qkv, 3, "[B, T, (H + 2 * Hkv) * D]");
  check_rows("rotary_packed", "qkv", qkv);
  const std::int64_t heads = n_head + 2 * n_kv_head;
  require(n_head >= 1 && n_kv_head >= 1 && qkv.dim(2) > 0 && qkv.dim(2) % heads == 0,
          "rotary_packed: the last dim of qkv must be (n_head + 2 * n_kv_head) * head_dim, got "
          "shape {} with n_head {} and n_kv_head {}",
          qkv.shape(), n_head, n_kv_head);
  return rotate("rotary_packed", qkv, heads, n_kv_head, options, first_position);
}

}  // namespace tessera::ops
