#include "kernels/selection.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(where, Where, args.y&& args.condition.numel() > 0)
TESSERA_KERNEL_IF(compare, Compare, args.y.numel() > 0)

}  // namespace tessera::kernels
