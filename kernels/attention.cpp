#include "kernels/attention.h"

#include <algorithm>

#include "kernels/dispatch.h"

namespace tessera::kernels {

namespace {

// Books cuDNN's workspace of a backward pass on Hopper, as plans of cuDNN 9.19 have it: the gradient of
// queries in f32, or, if deterministic, of scores, if that is more, and a sum for each row of scores. A batch that takes
// more than the limit runs in slices; of a sequence that does, tessera's own kernel.
void plan_library(Context& context, const AttentionBackward& args) {
  if (context.device().type != DeviceType::Meta || context.target().type != DeviceType::CUDA ||
      args.q.dtype != DType::BF16 || !args.variant.is_causal_only())
    return;
  const std::int64_t scores = context.deterministic() ? 2 * args.k.shape[1] : 0;
  const std::int64_t row = std::max(scores, 4 * args.q.shape[3]) + 4;
  const std::int64_t batch = args.q.shape[0];
  const std::int64_t sequence_bytes = args.log_sum_exp.numel() / batch * row;
  std::int64_t slice = batch;
  while (slice > 1 && !cuda::attention_workspace_fits(slice * sequence_bytes, slice))
    slice = (slice + 1) / 2;
  const std::int64_t bytes = slice * sequence_bytes;
  if (cuda::attention_workspace_fits(bytes, slice)) context.plan_library("cuDNN attention", bytes);
}

}  // namespace

TESSERA_CPU_KERNEL(attention_forward, AttentionForward)
TESSERA_CPU_KERNEL(attention_backward, AttentionBackward)

void attention_forward(Context& context, const AttentionForward& args) {
  if (args.q.numel() == 0) return;
  TESSERA_DISPATCH_WITH_SCRATCH(attention_forward, context, args);
}

void attention_backward(Context& context, const AttentionBackward& args) {
  if (args.k.numel() == 0) return;
  plan_library(context, args);
  TESSERA_DISPATCH_WITH_SCRATCH(attention_backward, context, args);
}

}  // namespace tessera::kernels
