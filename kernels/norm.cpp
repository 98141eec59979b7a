#include "kernels/norm.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL(layer_norm_forward, LayerNormForward)
TESSERA_KERNEL(layer_norm_backward, LayerNormBackward)
TESSERA_KERNEL(rms_norm_forward, RmsNormForward)
TESSERA_KERNEL(rms_norm_backward, RmsNormBackward)

}  // namespace tessera::kernels
