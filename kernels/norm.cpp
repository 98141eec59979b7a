#include "kernels/norm.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL(layer_norm_forward, NormForward)
TESSERA_KERNEL(layer_norm_backward, NormBackward)
TESSERA_KERNEL(rms_norm_forward, NormForward)
TESSERA_KERNEL(rms_norm_backward, NormBackward)

}  // namespace tessera::kernels
