#include "kernels/activation.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL(gelu_forward, GeluForward)

TESSERA_CPU_KERNEL(gelu_backward, GeluBackward)
void gelu_backward(Context& context, const GeluBackward& args) {
  if (!args.grad_x) return;
  TESSERA_DISPATCH(gelu_backward, context, args);
}

TESSERA_CPU_KERNEL(gated_forward, GatedForward)
void gated_forward(Context& context, const GatedForward& args) {
  if (args.gate.numel() == 0) return;
  TESSERA_DISPATCH(gated_forward, context, args);
}

TESSERA_CPU_KERNEL(gated_backward, GatedBackward)
void gated_backward(Context& context, const GatedBackward& args) {
  if ((!args.grad_gate && !args.grad_up) || args.gate.numel() == 0) return;
  TESSERA_DISPATCH(gated_backward, context, args);
}

}  // namespace tessera::kernels
