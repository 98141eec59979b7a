#include "kernels/norm.h"

#include "kernels/checks.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(layer_norm_forward, LayerNormForward)
TESSERA_CPU_KERNEL(layer_norm_backward, LayerNormBackward)
TESSERA_CPU_KERNEL(rms_norm_forward, RmsNormForward)
TESSERA_CPU_KERNEL(rms_norm_backward, RmsNormBackward)

namespace {

// Of x [rows, columns].
void check_x(std::string_view kernel, const Context& context, const TensorView& x,
             std::string_view purpose) {
  check_computing_dtype(kernel, "x", x);
  check_dims(kernel, "x", x, 2);
  require(x.shape[1] >= 1, "{}: x has no columns{}, got shape {}", kernel, purpose, x.shape);
  check_dense(kernel, "x", context, x, x.dtype, x.shape);
}

// What both norms have; bias and mean apart.
template <typename Args>
void check_forward(std::string_view kernel, const Context& context, const Args& args) {
  const TensorView& x = args.x;
  check_x(kernel, context, x, " to take a mean over");
  require(args.eps > 0.0, "{}: eps must be positive, got {}", kernel, args.eps);
  check_dense(kernel, "weight", context, args.weight, x.dtype, {x.shape[1]});
  check_dense(kernel, "y", context, args.y, x.dtype, x.shape);
  if (args.rstd.defined())
    check_dense(kernel, "rstd", context, args.rstd, accumulator_dtype(x.dtype), {x.shape[0]});
  require(args.residual.defined() == args.sum.defined(),
          "{}: residual and sum go together, only {} is given", kernel,
          args.sum.defined() ? "sum" : "residual");
  if (!args.residual.defined()) return;
  check_dense(kernel, "residual", context, args.residual, x.dtype, x.shape);
  check_dense(kernel, "sum", context, args.sum, x.dtype, x.shape);
}

template <typename Args>
void check_backward(std::string_view kernel, const Context& context, const Args& args) {
  const TensorView& x = args.x;
  check_x(kernel, context, x, "");
  const DType sum_dtype = accumulator_dtype(x.dtype);
  check_dense(kernel, "weight", context, args.weight, x.dtype, {x.shape[1]});
  check_dense(kernel, "rstd", context, args.rstd, sum_dtype, {x.shape[0]});
  check_dense(kernel, "grad_y", context, args.grad_y, x.dtype, x.shape);
  if (args.grad_x) check_dense(kernel, "grad_x", context, args.grad_x.view, x.dtype, x.shape);
  if (args.grad_weight)
    check_dense(kernel, "grad_weight", context, args.grad_weight.view, sum_dtype, {x.shape[1]});
}

}  // namespace

void layer_norm_forward(Context& context, const LayerNormForward& args) {
  constexpr auto kName = "layer_norm_forward";
  check_forward(kName, context, args);
  check_dense(kName, "bias", context, args.bias, args.x.dtype, {args.x.shape[1]});
  if (args.mean.defined())
    check_dense(kName, "mean", context, args.mean, accumulator_dtype(args.x.dtype),
                {args.x.shape[0]});
  TESSERA_DISPATCH(layer_norm_forward, context, args);
}

void layer_norm_backward(Context& context, const LayerNormBackward& args) {
  constexpr auto kName = "layer_norm_backward";
  check_backward(kName, context, args);
  const DType sum_dtype = accumulator_dtype(args.x.dtype);
  check_dense(kName, "mean", context, args.mean, sum_dtype, {args.x.shape[0]});
  if (args.grad_bias)
    check_dense(kName, "grad_bias", context, args.grad_bias.view, sum_dtype, {args.x.shape[1]});
  TESSERA_DISPATCH(layer_norm_backward, context, args);
}

void rms_norm_forward(Context& context, const RmsNormForward& args) {
  check_forward("rms_norm_forward", context, args);
  TESSERA_DISPATCH(rms_norm_forward, context, args);
}

void rms_norm_backward(Context& context, const RmsNormBackward& args) {
  check_backward("rms_norm_backward", context, args);
  TESSERA_DISPATCH(rms_norm_backward, context, args);
}

}  // namespace tessera::kernels
