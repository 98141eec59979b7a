#pragma once

#include <cstdint>

#include "kernels/cuda/device/number.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/elementwise.h"

namespace tessera::kernels::cuda {

/// Calls body(i, std::integral_constant<int, N>) for the elements [i, i + N) of each whole pack in
/// [0, n), then with N = 1 for each element that remains. Shared by `step` threads; this is `first`.
template <int N, typename Body>
__device__ __forceinline__ void for_packs(std::int64_t n, std::int64_t first, std::int64_t step,
                                          const Body& body) {
  const std::int64_t whole = n / N;
  for (std::int64_t i = first; i < whole; i += step) body(i * N, std::integral_constant<int, N>{});
  for (std::int64_t i = whole * N + first; i < n; i += step)
    body(i, std::integral_constant<int, 1>{});
}

template <int N, typename Body>
__global__ void __launch_bounds__(ElementwiseShape::kThreads)
    elementwise_kernel(std::int64_t n, Body body) {
  for_packs<N>(n, static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
               static_cast<std::int64_t>(gridDim.x) * blockDim.x, body);
}

/// Whether all addresses are multiples of 16 bytes.
template <typename... Ts>
bool is_aligned(const Ts*... data) {
  return ((reinterpret_cast<std::uintptr_t>(data) % 16 == 0) && ...);
}

/// Calls f(std::integral_constant<int, N>) with N = kPack<T>, or 1 without packs.
template <typename T, typename F>
void visit_pack(bool packs, const F& f) {
  if (packs)
    f(std::integral_constant<int, kPack<T>>{});
  else
    f(std::integral_constant<int, 1>{});
}

/// Runs elementwise_kernel. @param aligned  all operands of body begin at multiples of 16 bytes
template <int N, typename Body>
void launch_elementwise(Context& context, const char* name, std::int64_t n, bool aligned,
                        const Body& body) {
  if (n == 0) return;
  const auto shape = [&](int pack) {
    return LaunchShape{ElementwiseShape::blocks(n, pack), ElementwiseShape::kThreads};
  };
  if (aligned)
    launch(context, name, elementwise_kernel<N, Body>, shape(N), n, body);
  else
    launch(context, name, elementwise_kernel<1, Body>, shape(1), n, body);
}

}  // namespace tessera::kernels::cuda
