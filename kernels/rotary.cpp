#include "kernels/rotary.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(rotary, Rotary, args.x.numel() > 0 && args.y)

}  // namespace tessera::kernels
