#include "kernels/norm.h"

#include "kernels/checks.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(layer_norm_forward, LayerNormForward)
TESSERA_CPU_KERNEL(layer_norm_backward, LayerNormBackward)

void layer_norm_forward(Context& context, const LayerNormForward& args) {
  constexpr auto kName = "layer_norm_forward";
  const DType dtype = args.x.dtype;
  check_computing_dtype(kName, "x", args.x);
  check_dims(kName, "x", args.x, 2);
  const std::int64_t rows = args.x.shape[0], columns = args.x.shape[1];
  require(columns >= 1, "{}: x has no columns to take a mean over, got shape {}", kName,
          args.x.shape);
  require(args.eps > 0.0, "{}: eps must be positive, got {}", kName, args.eps);
  check_dense(kName, "x", context, args.x, dtype, args.x.shape);
  check_dense(kName, "weight", context, args.weight, dtype, {columns});
  check_dense(kName, "bias", context, args.bias, dtype, {columns});
  check_dense(kName, "y", context, args.y, dtype, args.x.shape);
  if (args.mean.defined())
    check_dense(kName, "mean", context, args.mean, accumulator_dtype(dtype), {rows});
  if (args.rstd.defined())
    check_dense(kName, "rstd", context, args.rstd, accumulator_dtype(dtype), {rows});
  TESSERA_DISPATCH(layer_norm_forward, context, args);
}

void layer_norm_backward(Context& context, const LayerNormBackward& args) {
  constexpr auto kName = "layer_norm_backward";
  const DType dtype = args.x.dtype;
  const DType sum_dtype = accumulator_dtype(dtype);
  check_computing_dtype(kName, "x", args.x);
  check_dims(kName, "x", args.x, 2);
  const std::int64_t rows = args.x.shape[0], columns = args.x.shape[1];
  require(columns >= 1, "{}: x has no columns, got shape {}", kName, args.x.shape);
  check_dense(kName, "x", context, args.x, dtype, args.x.shape);
  check_dense(kName, "weight", context, args.weight, dtype, {columns});
  check_dense(kName, "mean", context, args.mean, sum_dtype, {rows});
  check_dense(kName, "rstd", context, args.rstd, sum_dtype, {rows});
  check_dense(kName, "grad_y", context, args.grad_y, dtype, args.x.shape);
  if (args.grad_x) check_dense(kName, "grad_x", context, args.grad_x.view, dtype, args.x.shape);
  if (args.grad_weight)
    check_dense(kName, "grad_weight", context, args.grad_weight.view, sum_dtype, {columns});
  if (args.grad_bias)
    check_dense(kName, "grad_bias", context, args.grad_bias.view, sum_dtype, {columns});
  TESSERA_DISPATCH(layer_norm_backward, context, args);
}

}  // namespace tessera::kernels
