#include "kernels/activation.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL(gelu_forward, GeluForward)
TESSERA_KERNEL_IF(gelu_backward, GeluBackward, args.grad_x)
TESSERA_KERNEL_IF(gated_forward, GatedForward, args.gate.numel() > 0)
TESSERA_KERNEL_IF(gated_backward, GatedBackward,
                  (args.grad_gate || args.grad_up) && args.gate.numel() > 0)

}  // namespace tessera::kernels
