#include "kernels/cross_entropy.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(cross_entropy, CrossEntropy)
void cross_entropy(Context& context, const CrossEntropy& args) {
  if (args.logits.shape[0] == 0) return;
  TESSERA_DISPATCH(cross_entropy, context, args);
}

}  // namespace tessera::kernels
