#include <limits>
#include <type_traits>

#include "core/base/context.h"
#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/launch/attention.h"
#include "kernels/scratch.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {
namespace {

// delta[row] = sum of grad_out * out over the head. Eight threads per row. Memory-bound: reads
// grad_out and out once.
template <typename T, int N>
__global__ void __launch_bounds__(AttentionDeltaShape::kThreads)
    attention_delta_kernel(const AttentionBackwardArgs<T> args, std::int64_t rows) {
  using A = Compute<T>;
  constexpr int kTeam = AttentionDeltaShape::kTeam;
  const AttentionSizes& sizes = args.sizes;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * AttentionDeltaShape::kTeams + threadIdx.x / kTeam;
  const int member = static_cast<int>(threadIdx.x) % kTeam;
  A sum = 0;
  if (row < rows) {  // row = (batch * queries + token) * heads + head
    const int head = static_cast<int>(row % sizes.heads);
    const std::int64_t token = row / sizes.heads % sizes.queries;
    const std::int64_t batch = row / sizes.heads / sizes.queries;
    const T* const out = args.out.at(batch, token, head);
    const T* const grad_out = args.grad_out.at(batch, token, head);
    for (int d = member * N; d < sizes.dim; d += kTeam * N) {
      const Pack<T, N> x = load_pack<N>(out + d), g = load_pack<N>(grad_out + d);
      for (int k = 0; k < N; ++k) sum += widen(x[k]) * widen(g[k]);
    }
    for (int lanes = kTeam / 2; lanes > 0; lanes /= 2)
      sum += __shfl_xor_sync(0xffU << (threadIdx.x % kWarpSize / kTeam * kTeam), sum, lanes);
    if (member == 0) args.delta[(batch * sizes.heads + head) * sizes.queries + token] = sum;
  }
}

template <typename T>
void delta(Context& context, const AttentionBackwardArgs<T>& args) {
  const AttentionSizes& sizes = args.sizes;
  const std::int64_t rows = std::int64_t{sizes.batch} * sizes.heads * sizes.queries;
  if (rows == 0) return;
  const std::int64_t blocks =
      (rows + AttentionDeltaShape::kTeams - 1) / AttentionDeltaShape::kTeams;
  const bool packs = args.out.packs && args.grad_out.packs;
  launch(context, "attention_backward: delta",
         packs ? attention_delta_kernel<T, kPack<T>> : attention_delta_kernel<T, 1>,
         LaunchShape{attention_blocks("attention_backward", blocks, 1, 1),
                     AttentionDeltaShape::kThreads},
         args, rows);
}

/// Maximum number of tokens, so that int indices do not overflow one tile beyond the last token.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;

void check(std::string_view kernel, const TensorView& q, const TensorView& k) {
  require<Unsupported>(q.shape[3] <= kMostCudaHeadDim,
                       "{}: a head_dim of {} is more than the {} that it takes on CUDA", kernel,
                       q.shape[3], kMostCudaHeadDim);
  require<Unsupported>(k.shape[1] <= kMostTokens,
                       "{}: {} keys are more than the {} that it takes on CUDA", kernel, k.shape[1],
                       kMostTokens);
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  require<Unsupported>(q.shape[0] <= kMost && q.shape[2] <= kMost,
                       "{}: q of shape {} has more heads, or more in a batch, than the {} that it "
                       "takes on CUDA",
                       kernel, q.shape, kMost);
}

/// Throws if backward needs too much shared memory. Forward calls it too, to fail early.
void check_backward(Context& context, std::string_view kernel, const TensorView& q,
                    const AttentionVariant& variant) {
  if (q.dtype != DType::BF16 || !variant.is_causal_only()) return;
  const std::int64_t dim = q.shape[3];
  const int needed = attention_backward_bf16_shared_bytes(dim),
            most = context.limits().shared_bytes;
  require<Unsupported>(needed <= most,
                       "{}: the gradients of a head_dim of {} in bf16 take {} bytes of shared "
                       "memory in a block, more "
                       "than the {} of this GPU; raise model.n_head, train with --train.precision "
                       "fp32, or build with "
                       "cuDNN (tools/setup.sh --cuda)",
                       kernel, dim, needed, most);
}

}  // namespace

void attention_forward(Context& context, const AttentionForward& args) {
  if (attention_forward_by_library(context, args)) return;
  check("attention_forward", args.q, args.k);
  if (args.log_sum_exp.defined())
    check_backward(context, "attention_forward", args.q, args.variant);
  visit_floating(args.q.dtype, "attention_forward", [&]<typename T>(std::type_identity<T>) {
    const AttentionForwardArgs<T> arguments(args);
    if (!args.variant.is_causal_only())
      attention_forward_variant(context, arguments, args.variant);
    else if constexpr (std::is_same_v<T, BFloat16>)
      attention_forward_bf16(context, arguments);
    else
      attention_forward_plain(context, arguments);
  });
}

void attention_backward(Context& context, const AttentionBackward& args) {
  if (attention_backward_by_library(context, args)) return;
  check("attention_backward", args.q, args.k);
  check_backward(context, "attention_backward", args.q, args.variant);
  visit_floating(args.q.dtype, "attention_backward", [&]<typename T>(std::type_identity<T>) {
    const Workspace deltas(context, scratch_bytes(context.limits(), args), "attention_backward");
    const AttentionBackwardArgs<T> arguments(args, static_cast<Compute<T>*>(deltas.data()));
    delta(context, arguments);
    if (!args.variant.is_causal_only())
      attention_backward_variant(context, arguments, args.variant);
    else if constexpr (std::is_same_v<T, BFloat16>)
      attention_backward_bf16(context, arguments);
    else
      attention_backward_plain(context, arguments);
  });
}

TESSERA_CUDA_KERNEL(attention_forward, AttentionForward)
TESSERA_CUDA_KERNEL(attention_backward, AttentionBackward)

}  // namespace tessera::kernels::cuda
