#include "kernels/activation.h"

#include "kernels/checks.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(gelu_forward, GeluForward)
TESSERA_CPU_KERNEL(gelu_backward, GeluBackward)
TESSERA_CPU_KERNEL(gated_forward, GatedForward)
TESSERA_CPU_KERNEL(gated_backward, GatedBackward)

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

namespace {

// [R, H] like gate, rows strided at most.
void check_rows(std::string_view kernel, std::string_view argument, const Context& context,
                const TensorView& view, const TensorView& gate) {
  check_device(kernel, argument, context, view);
  check_dtype(kernel, argument, view, gate.dtype);
  check_shape(kernel, argument, view, gate.shape);
  require(view.shape[1] <= 1 || view.strides[1] == 1,
          "{}: the last dim of {} must be contiguous, got shape {} with strides {}", kernel,
          argument, view.shape, view.strides);
}

void check_gate(std::string_view kernel, const Context& context, const TensorView& gate) {
  check_computing_dtype(kernel, "gate", gate);
  check_dims(kernel, "gate", gate, 2);
  check_rows(kernel, "gate", context, gate, gate);
}

}  // namespace

void gated_forward(Context& context, const GatedForward& args) {
  constexpr auto kName = "gated_forward";
  check_gate(kName, context, args.gate);
  check_rows(kName, "up", context, args.up, args.gate);
  check_rows(kName, "y", context, args.y, args.gate);
  if (args.gate.numel() == 0) return;
  TESSERA_DISPATCH(gated_forward, context, args);
}

void gated_backward(Context& context, const GatedBackward& args) {
  if (!args.grad_gate && !args.grad_up) return;
  constexpr auto kName = "gated_backward";
  check_gate(kName, context, args.gate);
  check_rows(kName, "up", context, args.up, args.gate);
  check_rows(kName, "grad_y", context, args.grad_y, args.gate);
  if (args.grad_gate) check_rows(kName, "grad_gate", context, args.grad_gate.view, args.gate);
  if (args.grad_up) check_rows(kName, "grad_up", context, args.grad_up.view, args.gate);
  if (args.gate.numel() == 0) return;
  TESSERA_DISPATCH(gated_backward, context, args);
}

}  // namespace tessera::kernels
