#pragma once

#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch/sums.h"
#include "kernels/workspace.h"

// Sums of a whole tensor in float64, in an order that depends on its length only.
namespace tessera::kernels::cuda {

// Sums each part of the range to one float64. Threads stride over a part by the block's size.
// Memory-bound: reads each element once.
template <int N, typename T, typename Term>
__global__ void __launch_bounds__(SumShape::kThreads)
    sum_parts_kernel(const T* x, std::int64_t n, double* partials, Term term) {
  SharedMemory shared;
  const auto scratch = shared.take<double>(kWarpSize);
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * SumShape::kPart;
  const std::int64_t rest = n - begin;
  const int count = static_cast<int>(rest < SumShape::kPart ? rest : SumShape::kPart);
  const T* part = x + begin;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  double sum = 0;
  for (int i = thread * N; i + N <= count; i += threads * N) {
    const Pack<T, N> pack = load_pack<N>(part + i);
    for (int k = 0; k < N; ++k) sum += term(static_cast<double>(widen(pack[k])));
  }
  const int left_over = count / N * N + thread;
  if (left_over < count) sum += term(static_cast<double>(widen(part[left_over])));
  sum = block_reduce(sum, scratch, 0.0, Sum{});
  if (thread == 0) partials[blockIdx.x] = sum;
}

template <typename Finish>
__global__ void __launch_bounds__(SumShape::kFinalThreads)
    sum_partials_kernel(const double* partials, std::int64_t count, Finish finish) {
  SharedMemory shared;
  const auto scratch = shared.take<double>(kWarpSize);
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
  sum = block_reduce(sum, scratch, 0.0, Sum{});
  if (threadIdx.x == 0) finish(sum);
}

/// Calls finish(sum of term(x[i])) in one thread.
template <typename T, typename Term, typename Finish>
void launch_sum(Context& context, const char* name, const T* x, std::int64_t n, const Term& term,
                const Finish& finish) {
  constexpr int kScratch = SharedMemory::shared_bytes<double>(kWarpSize);
  const unsigned parts = SumShape::parts(n);
  const Workspace workspace(context, SumShape::scratch_bytes(n), name);
  auto* partials = static_cast<double*>(workspace.data());
  const LaunchShape shape{parts, SumShape::kThreads, kScratch};
  if (parts > 0 && is_aligned(x))
    launch(context, name, sum_parts_kernel<kPack<T>, T, Term>, shape, x, n, partials, term);
  else if (parts > 0)
    launch(context, name, sum_parts_kernel<1, T, Term>, shape, x, n, partials, term);
  launch(context, name, sum_partials_kernel<Finish>,
         LaunchShape{1, SumShape::kFinalThreads, kScratch}, partials,
         static_cast<std::int64_t>(parts), finish);
}

}  // namespace tessera::kernels::cuda
