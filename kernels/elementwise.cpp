#include "kernels/elementwise.h"

#include "kernels/dispatch.h"
#include "kernels/elementwise_args.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(add, Add)
TESSERA_CPU_KERNEL(fill, Fill)
TESSERA_CPU_KERNEL(cast, Cast)
TESSERA_CPU_KERNEL(sum_rows, SumRows)
TESSERA_CPU_KERNEL(sum, Total)

namespace {

void check_rows(std::string_view argument, const Context& context, const TensorView& view,
                const Shape& shape) {
  check_device("cast", argument, context, view);
  check_shape("cast", argument, view, shape);
  require(view.is_contiguous() || (shape.size() == 2 && (shape[1] <= 1 || view.strides[1] == 1) &&
                                   view.strides[0] >= 0),
          "cast: {} must be contiguous, or [R, C] with strided rows, got shape {} with strides {}",
          argument, view.shape, view.strides);
}

}  // namespace

void add(Context& context, const TensorView& a, const TensorView& b, const TensorView& y) {
  const Add args{a, b, y};
  TESSERA_DISPATCH(add, context, args);
}

void fill(Context& context, const TensorView& out, double value) {
  check_computing_dtype("fill", "out", out);
  check_dense("fill", "out", context, out, out.dtype);
  const Fill args{out, value};
  TESSERA_DISPATCH(fill, context, args);
}

void cast(Context& context, const TensorView& in, const GradientView& out, double scale) {
  if (!out) return;
  check_computing_dtype("cast", "in", in);
  check_computing_dtype("cast", "out", out.view);
  check_rows("in", context, in, in.shape);
  check_rows("out", context, out.view, in.shape);
  const Cast args{in, out, scale};
  TESSERA_DISPATCH(cast, context, args);
}

void sum_rows(Context& context, const TensorView& in, const GradientView& out) {
  if (!out) return;
  check_computing_dtype("sum_rows", "in", in);
  check_device("sum_rows", "in", context, in);
  require(in.shape.size() == 2, "sum_rows: in must have 2 dims, got shape {}", in.shape);
  require(in.shape[1] <= 1 || in.strides[1] == 1,
          "sum_rows: the last dim of in must be contiguous, got strides {}", in.strides);
  check_dense("sum_rows", "out", context, out.view, accumulator_dtype(in.dtype));
  check_shape("sum_rows", "out", out.view, {in.shape[1]});
  const SumRows args{in, out};
  TESSERA_DISPATCH(sum_rows, context, args);
}

void sum(Context& context, const TensorView& in, const GradientView& out, double scale) {
  if (!out) return;
  check_computing_dtype("sum", "in", in);
  check_dense("sum", "in", context, in, in.dtype);
  check_single("sum", "out", context, out.view,
               out.view.dtype == DType::F64 ? DType::F64 : accumulator_dtype(in.dtype));
  const Total args{in, out, scale};
  TESSERA_DISPATCH(sum, context, args);
}

}  // namespace tessera::kernels
