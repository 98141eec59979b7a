#include "kernels/attention.h"

#include <algorithm>

#include "kernels/dispatch.h"

namespace tessera::kernels {

namespace {

// Books cuDNN's workspace of a backward pass on Hopper, as plans of cuDNN 9.19 and 9.26 have it: a sum for each row
// of scores; the gradient of queries in f32 or, if deterministic, of scores in tiles of 64 x 128; with grouped
// queries, the gradients of keys and values for each query head. A batch that takes more than the limit runs in
// slices; of a sequence that does, tessera's own kernel.
void plan_library(Context& context, const AttentionBackward& args) {
  if (context.device().type != DeviceType::Meta || context.target().type != DeviceType::CUDA ||
      args.q.dtype != DType::BF16 || !args.variant.is_causal_only() ||
      args.q.shape[1] != args.k.shape[1] || args.q.shape[3] % 8 != 0)
    return;
  for (const GradientView* gradient : {&args.grad_q, &args.grad_k, &args.grad_v})
    if (!gradient->wanted || gradient->accumulate) return;
  const auto round_up = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
  const std::int64_t queries = args.q.shape[1], heads = args.q.shape[2], dim = args.q.shape[3];
  const std::int64_t keys = args.k.shape[1];
  std::int64_t head_bytes = 4 * queries;
  head_bytes +=
      context.deterministic() ? 2 * round_up(queries, 64) * round_up(keys, 128) : 4 * queries * dim;
  if (args.k.shape[2] != heads) head_bytes += 2 * 2 * keys * dim;
  std::int64_t slice = args.q.shape[0];
  const auto bytes = [&] { return slice * heads * head_bytes + 256; };
  while (slice > 1 && !cuda::attention_workspace_fits(bytes(), slice)) slice = (slice + 1) / 2;
  if (cuda::attention_workspace_fits(bytes(), slice))
    context.plan_library("cuDNN attention", bytes());
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
