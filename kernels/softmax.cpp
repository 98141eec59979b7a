#include "kernels/softmax.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(softmax_forward, SoftmaxForward, args.x.numel() > 0)
TESSERA_KERNEL_IF(softmax_backward, SoftmaxBackward, args.grad_x&& args.y.numel() > 0)

}  // namespace tessera::kernels
