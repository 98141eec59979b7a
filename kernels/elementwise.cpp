#include "kernels/elementwise.h"

#include "kernels/checks.h"
#include "kernels/elementwise_args.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(add, Add)
TESSERA_CPU_KERNEL(fill, Fill)
TESSERA_CPU_KERNEL(cast, Cast)
TESSERA_CPU_KERNEL(sum_rows, SumRows)

void add(Context& context, const TensorView& a, const TensorView& b, const TensorView& y) {
  check_computing_dtype("add", "a", a);
  check_dense("add", "a", context, a, a.dtype, a.shape);
  check_dense("add", "b", context, b, a.dtype, a.shape);
  check_dense("add", "y", context, y, a.dtype, a.shape);
  const Add args{a, b, y};
  TESSERA_DISPATCH(add, context, args);
}

void fill(Context& context, const TensorView& out, double value) {
  check_computing_dtype("fill", "out", out);
  check_dense("fill", "out", context, out, out.dtype, out.shape);
  const Fill args{out, value};
  TESSERA_DISPATCH(fill, context, args);
}

void cast(Context& context, const TensorView& in, const GradientView& out, double scale) {
  if (!out) return;
  check_computing_dtype("cast", "in", in);
  check_computing_dtype("cast", "out", out.view);
  check_dense("cast", "in", context, in, in.dtype, in.shape);
  check_dense("cast", "out", context, out.view, out.view.dtype, in.shape);
  const Cast args{in, out, scale};
  TESSERA_DISPATCH(cast, context, args);
}

void sum_rows(Context& context, const TensorView& in, const GradientView& out) {
  if (!out) return;
  check_computing_dtype("sum_rows", "in", in);
  check_device("sum_rows", "in", context, in);
  check_dims("sum_rows", "in", in, 2);
  require(in.shape[1] <= 1 || in.strides[1] == 1,
          "sum_rows: the last dim of in must be contiguous, got strides {}", in.strides);
  check_dense("sum_rows", "out", context, out.view, accumulator_dtype(in.dtype), {in.shape[1]});
  const SumRows args{in, out};
  TESSERA_DISPATCH(sum_rows, context, args);
}

}  // namespace tessera::kernels
