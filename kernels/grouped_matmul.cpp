#include "kernels/grouped_matmul.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {
namespace {

// Plans as if all groups had equally many rows.
template <typename Args>
void plan_flops(Context& context, const Args& args, std::int64_t width) {
  if (context.device().type == DeviceType::Meta)
    context.plan_flops(2.0 * static_cast<double>(args.a.numel()) * static_cast<double>(width) *
                       static_cast<double>(args.groups) /
                       static_cast<double>(args.offsets.shape[0] - 1));
}

}  // namespace

TESSERA_CPU_KERNEL(grouped_matmul, GroupedMatmul)
TESSERA_CPU_KERNEL(grouped_gradient, GroupedGradient)

void grouped_matmul(Context& context, const GroupedMatmul& args) {
  if (!args.c || args.c.view.numel() == 0) return;
  plan_flops(context, args, args.c.view.shape[1]);
  if (args.a.dtype == DType::BF16) TESSERA_DISPATCH_WITH_SCRATCH(grouped_matmul, context, args);
  TESSERA_DISPATCH(grouped_matmul, context, args);
}

void grouped_gradient(Context& context, const GroupedGradient& args) {
  plan_flops(context, args, args.b.shape[1]);
  if (args.a.dtype == DType::BF16) TESSERA_DISPATCH_WITH_SCRATCH(grouped_gradient, context, args);
  TESSERA_DISPATCH(grouped_gradient, context, args);
}

}  // namespace tessera::kernels
