#include "kernels/attention.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_WITH_SCRATCH_IF(attention_forward, AttentionForward, args.q.numel() > 0)
TESSERA_KERNEL_WITH_SCRATCH_IF(attention_backward, AttentionBackward, args.k.numel() > 0)

}  // namespace tessera::kernels
