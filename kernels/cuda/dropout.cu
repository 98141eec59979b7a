#include "kernels/cuda/device/random.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/dropout.h"

namespace tessera::kernels::cuda {
namespace {

// Memory-bound, as long as Philox's roughly 20 multiplications per four elements are hidden.
template <typename T, bool kAccumulate>
struct DropoutBody {
  const T* x;
  T* y;
  float p;
  Compute<T> scale;
  const RngStep* rng;
  std::uint64_t place, sample_elements;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    std::uint32_t words[N];
    const Pack<T, N> in = load_pack<N>(x + i);
    Pack<T, N> out;
    if constexpr (kAccumulate) out = load_pack<N>(y + i);
    const RngStep at = *rng;
    draw<N>(RngKey::make(at.seed, RngPurpose::Dropout, at.step, place),
            at.first_sample * sample_elements + static_cast<std::uint64_t>(i), words);
    for (int k = 0; k < N; ++k) {
      const Compute<T> scaled = widen(in[k]) * scale;
      Compute<T> value = uniform_from_bits(words[k]) >= p ? scaled : Compute<T>(0);
      if constexpr (kAccumulate) value += widen(out[k]);
      out[k] = narrow<T>(value);
    }
    store_pack<N>(y + i, out);
  }
};

template <typename T, bool kAccumulate>
void run(Context& context, const Dropout& args) {
  using A = Compute<T>;
  const DropoutBody<T, kAccumulate> body{static_cast<const T*>(args.x.data),
                                         static_cast<T*>(args.y.view.data),
                                         args.p,
                                         A(1) / (A(1) - static_cast<A>(args.p)),
                                         args.rng,
                                         args.place,
                                         args.sample_elements};
  launch_elementwise<kPack<T>>(context, "dropout", args.x.numel(), is_aligned(body.x, body.y),
                               body);
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
