#include "kernels/binary.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(binary, Binary, args.y&& args.a.numel() > 0)

}  // namespace tessera::kernels
