#include <cmath>

#include "kernels/cuda/device/random.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/dropout.h"

namespace tessera::kernels::cuda {
namespace {

template <typename T, bool kAccumulate>
struct DropoutBody {
  const T* x;
  T* y;
  std::uint32_t
      kept_from;  // least random word that keeps an element: uniform_from_bits() is p or more
  Compute<T> scale;
  RngKey key;
  std::uint64_t first_draw;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    std::uint32_t words[N];
    const Pack<T, N> in = load_pack<N>(x + i);
    Pack<T, N> before{};
    if constexpr (kAccumulate) before = load_pack<N>(y + i);
    draw<N>(key, first_draw + static_cast<std::uint64_t>(i), words);
    Compute<T> out[N];
    for (int k = 0; k < N; ++k) {
      const Compute<T> scaled = widen(in[k]) * scale;
      out[k] = words[k] >= kept_from ? scaled : Compute<T>(0);
      if constexpr (kAccumulate) out[k] += widen(before[k]);
    }
    store_pack<N>(y + i, narrow_pack<T>(out));
  }
};

// Memory-bound, as long as Philox's roughly 20 multiplications per four elements are hidden. The key, which takes
// as many, is made once per thread.
template <int N, typename Body>
__global__ void __launch_bounds__(ElementwiseShape::kThreads)
    dropout_kernel(std::int64_t n, Body body, const RngStep* rng, std::uint64_t place,
                   std::uint64_t sample_elements) {
  const RngStep at = *rng;
  body.key = RngKey::make(at.seed, RngPurpose::Dropout, at.step, place);
  body.first_draw = at.first_sample * sample_elements;
  for_packs<N>(n, static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
               static_cast<std::int64_t>(gridDim.x) * blockDim.x, body);
}

template <typename T, bool kAccumulate>
void run(Context& context, const Dropout& args) {
  using A = Compute<T>;
  using Body = DropoutBody<T, kAccumulate>;
  const std::int64_t n = args.x.numel();
  if (n == 0) return;
  const Body body{.x = static_cast<const T*>(args.x.data),
                  .y = static_cast<T*>(args.y.view.data),
                  .kept_from = static_cast<std::uint32_t>(std::ceil(args.p * 0x1.0p24F)) << 8,
                  .scale = A(1) / (A(1) - static_cast<A>(args.p)),
                  .key = {},
                  .first_draw = 0};
  visit_pack<T>(is_aligned(body.x, body.y), [&]<int N>(std::integral_constant<int, N>) {
    launch(context, "dropout", dropout_kernel<N, Body>,
           LaunchShape{ElementwiseShape::blocks(n, N), ElementwiseShape::kThreads}, n, body,
           args.rng, args.place, args.sample_elements);
  });
}

}  // namespace

void dropout(Context& context, const Dropout& args) {
  visit_floating(args.x.dtype, "dropout", [&]<typename T>(std::type_identity<T>) {
    if (args.y.accumulate)
      run<T, true>(context, args);
    else
      run<T, false>(context, args);
  });
}

TESSERA_CUDA_KERNEL(dropout, Dropout)

}  // namespace tessera::kernels::cuda
