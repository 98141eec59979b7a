#include "kernels/matmul.h"

#include "kernels/activation.h"
#include "kernels/checks.h"
#include "kernels/elementwise.h"

namespace tessera::kernels {
namespace {

void check_matrix(const Context& context, std::string_view name, const TensorView& view) {
  check_device("matmul", name, context, view);
  require(view.shape.size() == 2, "matmul: {} must have 2 dims, got shape {}", name, view.shape);
  require(view.shape[1] <= 1 || view.strides[1] == 1,
          "matmul: the last dim of {} must be contiguous, got shape {} with strides {}", name,
          view.shape, view.strides);
  require(view.shape[0] <= 1 || view.strides[0] >= view.shape[1],
          "matmul: rows of {} overlap, got shape {} with strides {}", name, view.shape,
          view.strides);
}

void check(const Context& context, const Matmul& args) {
  check_matrix(context, "a", args.a);
  check_matrix(context, "b", args.b);
  check_matrix(context, "c", args.c);
  const DType dtype = args.a.dtype;
  require<Unsupported>(dtype == DType::F64 || dtype == DType::F32 || dtype == DType::BF16,
                       "matmul is not available for dtype {}; use f32, bf16 or f64", dtype);
  check_dtype("matmul", "b", args.b, dtype);
  require(args.c.dtype == dtype || args.c.dtype == accumulator_dtype(dtype),
          "matmul: c must have dtype {} or {}, got {}", dtype, accumulator_dtype(dtype),
          args.c.dtype);
  const Shape& a = args.a.shape;
  const Shape& b = args.b.shape;
  const std::int64_t m = args.transpose_a ? a[1] : a[0];
  const std::int64_t k = args.transpose_a ? a[0] : a[1];
  const std::int64_t b_k = args.transpose_b ? b[1] : b[0];
  const std::int64_t n = args.transpose_b ? b[0] : b[1];
  require(k == b_k, "matmul: inner dims differ: a {}{} has {}, b {}{} has {}", a,
          args.transpose_a ? " transposed" : "", k, b, args.transpose_b ? " transposed" : "", b_k);
  check_shape("matmul", "c", args.c, {m, n});
  if (args.bias.defined()) {
    check_device("matmul", "bias", context, args.bias);
    check_dtype("matmul", "bias", args.bias, dtype);
    check_shape("matmul", "bias", args.bias, {n});
    check_contiguous("matmul", "bias", args.bias);
  }
}

void check_epilogue(std::string_view kernel, const Context& context, const Matmul& product,
                    const TensorView& pre) {
  check(context, product);
  check_dtype(kernel, "c", product.c, product.a.dtype);
  check_contiguous(kernel, "c", product.c);
  require(!product.accumulate, "{}: c can't be accumulated on", kernel);
  if (!pre.defined()) return;
  check_dense(kernel, "pre", context, pre, product.a.dtype, product.c.shape);
  require(pre.data == nullptr || pre.data != product.c.data, "{}: pre and c must not overlap",
          kernel);
}

}  // namespace

TESSERA_CPU_KERNEL(matmul, Matmul)

void matmul(Context& context, const Matmul& args) {
  check(context, args);
  if (args.c.numel() == 0) return;
  TESSERA_DISPATCH(matmul, context, args);
}

void matmul_gelu(Context& context, const MatmulGelu& args) {
  check_epilogue("matmul_gelu", context, args.product, args.pre);
  const TensorView& c = args.product.c;
  if (c.numel() == 0) return;
  TESSERA_DISPATCH_FUSED(matmul_gelu, context, args);
  Matmul product = args.product;
  if (args.pre.defined()) product.c = args.pre;
  matmul(context, product);
  gelu_forward(context, {product.c, c});
}

void matmul_gelu_backward(Context& context, const MatmulGeluBackward& args) {
  constexpr auto kName = "matmul_gelu_backward";
  check_epilogue(kName, context, args.product, args.pre);
  require(args.pre.defined(), "{}: needs pre", kName);
  require(!args.product.bias.defined(), "{}: takes no bias", kName);
  const TensorView& c = args.product.c;
  if (c.numel() == 0) return;
  TESSERA_DISPATCH_FUSED(matmul_gelu_backward, context, args);
  matmul(context, args.product);
  gelu_backward(context, {args.pre, c, {c, false, true}});
}

void matmul_bias_gradient(Context& context, const MatmulBiasGradient& args) {
  constexpr std::string_view kName = "matmul_bias_gradient";
  const Matmul& product = args.product;
  check(context, product);
  require(!product.bias.defined(), "{}: takes no bias", kName);
  require(args.of_a ? product.transpose_a : !product.transpose_b,
          "{}: the gradient must have its sums' terms as rows: {}", kName,
          args.of_a ? "a transposed" : "b not transposed");
  const TensorView& gradient = args.gradient();
  check_dense(kName, "bias", context, args.bias.view, accumulator_dtype(gradient.dtype),
              Shape{gradient.shape[1]});
  if (product.c.numel() > 0 && product.a.numel() > 0)
    TESSERA_DISPATCH_FUSED(matmul_bias_gradient, context, args);
  matmul(context, product);
  sum_rows(context, gradient, args.bias);
}

}  // namespace tessera::kernels
