#include "kernels/cross_entropy.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(cross_entropy, CrossEntropy, args.logits.shape[0] > 0)

}  // namespace tessera::kernels
