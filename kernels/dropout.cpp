#include "kernels/dropout.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(dropout, Dropout, args.y)

}  // namespace tessera::kernels
