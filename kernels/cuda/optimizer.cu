#include <cmath>

#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch/sum_of_squares.h"
#include "kernels/optimizer.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {
namespace {

// Bound by memory: reads 16 bytes of an element and writes 12.
struct AdamWBody {
  float* param;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  float scale, beta1, beta2, one_minus_beta1, one_minus_beta2, decay, rate, v_scale, eps;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const Pack<float, N> gradients = load_pack<N>(grad + i);
    Pack<float, N> m = load_pack<N>(exp_avg + i);
    Pack<float, N> v = load_pack<N>(exp_avg_sq + i);
    Pack<float, N> weights = load_pack<N>(param + i);
    for (int k = 0; k < N; ++k) {
      const float g = scale * gradients[k];
      m[k] = beta1 * m[k] + one_minus_beta1 * g;
      v[k] = beta2 * v[k] + one_minus_beta2 * g * g;
      weights[k] = weights[k] * decay - rate * m[k] / (std::sqrt(v[k]) * v_scale + eps);
    }
    store_pack<N>(exp_avg + i, m);
    store_pack<N>(exp_avg_sq + i, v);
    store_pack<N>(param + i, weights);
  }
};

// One float64 for each part of the range; a thread adds packs that lie a block apart. A square of a
// float is exact in double. Bound by memory: 4 bytes read for each element.
template <int N>
__global__ void __launch_bounds__(SumOfSquaresShape::kThreads)
    sum_of_squares_kernel(const float* x, std::int64_t n, double* partials) {
  SharedMemory shared;
  const auto scratch = shared.take<double>(kWarpSize);
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * SumOfSquaresShape::kPart;
  const std::int64_t rest = n - begin;
  const int count =
      static_cast<int>(rest < SumOfSquaresShape::kPart ? rest : SumOfSquaresShape::kPart);
  const float* part = x + begin;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  double sum = 0;
  for (int i = thread * N; i + N <= count; i += threads * N) {
    const Pack<float, N> pack = load_pack<N>(part + i);
    for (int k = 0; k < N; ++k) sum += static_cast<double>(pack[k]) * static_cast<double>(pack[k]);
  }
  const int left_over = count / N * N + thread;
  if (left_over < count) {
    const auto value = static_cast<double>(part[left_over]);
    sum += value * value;
  }
  sum = block_reduce(sum, scratch, 0.0, Sum{});
  if (thread == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(SumOfSquaresShape::kFinalThreads)
    sum_partials_kernel(const double* partials, std::int64_t count, double* result) {
  SharedMemory shared;
  const auto scratch = shared.take<double>(kWarpSize);
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
  sum = block_reduce(sum, scratch, 0.0, Sum{});
  if (threadIdx.x == 0) *result = sum;
}

}  // namespace

void adamw(Context& context, const AdamW& args) {
  // As in kernels/cpu/optimizer.cpp: what does not change within the step is worked out once.
  const auto step = static_cast<double>(args.step);
  const AdamWBody body{
      .param = static_cast<float*>(args.param.data),
      .grad = static_cast<const float*>(args.grad.data),
      .exp_avg = static_cast<float*>(args.exp_avg.data),
      .exp_avg_sq = static_cast<float*>(args.exp_avg_sq.data),
      .scale = static_cast<float>(args.grad_scale),
      .beta1 = static_cast<float>(args.beta1),
      .beta2 = static_cast<float>(args.beta2),
      .one_minus_beta1 = static_cast<float>(1.0 - args.beta1),
      .one_minus_beta2 = static_cast<float>(1.0 - args.beta2),
      .decay = static_cast<float>(1.0 - args.lr * args.weight_decay),
      .rate = static_cast<float>(args.lr / (1.0 - std::pow(args.beta1, step))),
      .v_scale = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(args.beta2, step))),
      .eps = static_cast<float>(args.eps)};
  launch_elementwise<kPack<float>>(context, "adamw", args.param.numel(),
                                   is_aligned(body.param) && is_aligned(body.grad) &&
                                       is_aligned(body.exp_avg) && is_aligned(body.exp_avg_sq),
                                   body);
}

void sum_of_squares(Context& context, const SumOfSquares& args) {
  constexpr int kScratch = SharedMemory::shared_bytes<double>(kWarpSize);
  const auto* x = static_cast<const float*>(args.x.data);
  const std::int64_t n = args.x.numel();
  const unsigned parts = SumOfSquaresShape::parts(n);
  const Workspace workspace(context, parts * sizeof(double), "sum_of_squares");
  auto* partials = static_cast<double*>(workspace.data());
  const LaunchShape shape{parts, SumOfSquaresShape::kThreads, kScratch};
  if (parts > 0 && is_aligned(x))
    launch(context, "sum_of_squares", sum_of_squares_kernel<kPack<float>>, shape, x, n, partials);
  else if (parts > 0)
    launch(context, "sum_of_squares", sum_of_squares_kernel<1>, shape, x, n, partials);
  launch(context, "sum_of_squares", sum_partials_kernel,
         LaunchShape{1, SumOfSquaresShape::kFinalThreads, kScratch}, partials,
         static_cast<std::int64_t>(parts), static_cast<double*>(args.sum.data));
}

TESSERA_CUDA_KERNEL(adamw, AdamW)
TESSERA_CUDA_KERNEL(sum_of_squares, SumOfSquares)

}  // namespace tessera::kernels::cuda
