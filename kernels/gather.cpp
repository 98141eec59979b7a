#include "kernels/gather.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(gather, Gather, args.index.numel() > 0)
TESSERA_KERNEL_IF(scatter_add, ScatterAdd, args.index.numel() > 0)

}  // namespace tessera::kernels
