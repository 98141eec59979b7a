#include "kernels/grouped_matmul.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {
TESSERA_CPU_KERNEL(grouped_matmul, GroupedMatmul)
TESSERA_CPU_KERNEL(grouped_gradient, GroupedGradient)

void grouped_matmul(Context& context, const GroupedMatmul& args) {
  if (!args.c || args.c.view.numel() == 0) return;
  if (args.a.dtype != DType::F64) TESSERA_DISPATCH_WITH_SCRATCH(grouped_matmul, context, args);
  TESSERA_DISPATCH(grouped_matmul, context, args);
}

void grouped_gradient(Context& context, const GroupedGradient& args) {
  if (args.a.dtype == DType::BF16) TESSERA_DISPATCH_WITH_SCRATCH(grouped_gradient, context, args);
  TESSERA_DISPATCH(grouped_gradient, context, args);
}

}  // namespace tessera::kernels
