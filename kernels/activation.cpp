#include "kernels/activation.h"

#include "kernels/checks.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(gelu_forward, GeluForward)
TESSERA_CPU_KERNEL(gelu_backward, GeluBackward)

void gelu_forward(Context& context, const GeluForward& args) {
  constexpr auto kName = "gelu_forward";
  check_computing_dtype(kName, "x", args.x);
  check_dense(kName, "x", context, args.x, args.x.dtype, args.x.shape);
  check_dense(kName, "y", context, args.y, args.x.dtype, args.x.shape);
  TESSERA_DISPATCH(gelu_forward, context, args);
}

void gelu_backward(Context& context, const GeluBackward& args) {
  if (!args.grad_x) return;
  constexpr auto kName = "gelu_backward";
  check_computing_dtype(kName, "x", args.x);
  check_dense(kName, "x", context, args.x, args.x.dtype, args.x.shape);
  check_dense(kName, "grad_y", context, args.grad_y, args.x.dtype, args.x.shape);
  check_dense(kName, "grad_x", context, args.grad_x.view, args.x.dtype, args.x.shape);
  TESSERA_DISPATCH(gelu_backward, context, args);
}

}  // namespace tessera::kernels
