#include "kernels/cuda/elementwise.h"
#include "kernels/dropout.h"

namespace tessera::kernels::cuda {
namespace {

// Words number .. number + N - 1 of a stream. A counter yields four words; `number` may begin
// between two of them, so one more counter may be needed than N / 4. Every index is a constant: an
// index known at run time would put the words into memory.
template <int N>
__device__ __forceinline__ void draw(const RngKey& key, std::uint64_t number,
                                     std::uint32_t (&words)[N]) {
  constexpr int kGroups = (N + 6) / 4;
  const int skip = static_cast<int>(number % 4);
  std::uint32_t all[4 * kGroups + 3] = {};
  for (int group = 0; group < kGroups; ++group) {
    if (4 * group >= skip + N) break;
    const auto four = key.words(number / 4 + static_cast<std::uint64_t>(group));
    for (int i = 0; i < 4; ++i) all[4 * group + i] = four[static_cast<std::size_t>(i)];
  }
  for (int k = 0; k < N; ++k) {
    const std::uint32_t low = skip % 2 == 0 ? all[k] : all[k + 1];
    const std::uint32_t high = skip % 2 == 0 ? all[k + 2] : all[k + 3];
    words[k] = skip < 2 ? low : high;
  }
}

// Bound by the bytes moved as long as Philox's some 20 multiplications for four elements fit beside
// them.
template <typename T, bool kAccumulate>
struct DropoutBody {
  const T* x;
  T* y;
  float p;
  Compute<T> scale;
  RngKey key;
  std::uint64_t first_element;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    std::uint32_t words[N];
    const Pack<T, N> in = load_pack<N>(x + i);
    Pack<T, N> out;
    if constexpr (kAccumulate) out = load_pack<N>(y + i);
    draw<N>(key, first_element + static_cast<std::uint64_t>(i), words);
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
                                         args.key,
                                         args.first_element};
  launch_elementwise<kPack<T>>(context, "dropout", args.x.numel(),
                               is_aligned(body.x) && is_aligned(body.y), body);
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
