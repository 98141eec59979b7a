#include <cmath>

#include "kernels/cuda/device/shared.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch/rotary.h"
#include "kernels/rotary.h"

namespace tessera::kernels::cuda {
namespace {

template <typename T>
struct Arguments {
  const T* x;
  T* y;
  std::int64_t x_strides[3], y_strides[3];  ///< of batch, time, head
  std::int64_t first_position;
  RotaryAngles angles;
  int copied;  ///< numbers of a head after the pairs
  int heads, rotated_heads;
  bool inverse, accumulate;
};

__device__ __forceinline__ void sine_and_cosine(double half_turns, double* sine, double* cosine) {
  sincospi(half_turns, sine, cosine);
}
__device__ __forceinline__ void sine_and_cosine(double half_turns, float* sine, float* cosine) {
  sincospif(static_cast<float>(half_turns), sine, cosine);
}

/// Loads N elements of shared memory in the widest accesses.
template <int N, typename A>
__device__ __forceinline__ void load_shared(const SharedArray<A>& from, int i, A (&to)[N]) {
  constexpr int kPart = N < kPack<A> ? N : kPack<A>;
  for (int k = 0; k < N; k += kPart) {
    const Pack<A, kPart> part = from.template load<kPart>(i + k);
    for (int j = 0; j < kPart; ++j) to[k + j] = part[j];
  }
}

// Block (t, b) owns a token: computes the cosines and sines of its position in shared memory, then
// rotates all heads, a pair of packs per thread. Angles are turns in f64, so that whole turns drop
// out before rounding to f32. Memory-bound: some 60 f64 instructions per angle serve all heads.
template <typename T, int N>
__global__ void __launch_bounds__(RotaryShape::kMostThreads)
    rotary_kernel(const Arguments<T> args) {
  using A = Compute<T>;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int half = args.angles.pairs;
  SharedMemory memory;
  const SharedArray<A> cosines = memory.take<A>(half), sines = memory.take<A>(half);

  const auto position = static_cast<double>(args.first_position + blockIdx.x);
  const auto factor = static_cast<A>(args.angles.factor);
  for (int i = thread; i < half; i += threads) {
    const double turns = position * (args.angles.step[i] * 0.15915494309189533577);
    A sine, cosine;
    sine_and_cosine(2.0 * (turns - std::rint(turns)), &sine, &cosine);
    cosines[i] = factor * cosine;
    sines[i] = factor * (args.inverse ? -sine : sine);
  }
  __syncthreads();

  const T* const x = args.x + blockIdx.y * args.x_strides[0] + blockIdx.x * args.x_strides[1];
  T* const y = args.y + blockIdx.y * args.y_strides[0] + blockIdx.x * args.y_strides[1];
  const int packs = half / N;
  for (int i = thread; i < args.heads * packs; i += threads) {
    const int head = i / packs, pair = (i - head * packs) * N;
    const T* const from = x + head * args.x_strides[2] + pair;
    T* const to = y + head * args.y_strides[2] + pair;
    const Pack<T, N> low = load_pack<N>(from), high = load_pack<N>(from + half);
    Pack<T, N> to_low{}, to_high{};
    if (args.accumulate) {
      to_low = load_pack<N>(to);
      to_high = load_pack<N>(to + half);
    }
    A cosine[N], sine[N];
    if (head < args.rotated_heads) {
      load_shared(cosines, pair, cosine);
      load_shared(sines, pair, sine);
    }
    for (int k = 0; k < N; ++k) {
      A a = widen(low[k]), b = widen(high[k]);
      if (head < args.rotated_heads) {
        const A rotated = a * cosine[k] - b * sine[k];
        b = b * cosine[k] + a * sine[k];
        a = rotated;
      }
      to_low[k] = narrow<T>(args.accumulate ? a + widen(to_low[k]) : a);
      to_high[k] = narrow<T>(args.accumulate ? b + widen(to_high[k]) : b);
    }
    store_pack<N>(to, to_low);
    store_pack<N>(to + half, to_high);
  }
  const int copied = args.copied / N;
  for (int i = thread; i < args.heads * copied; i += threads) {
    const int head = i / copied, at = 2 * half + (i - head * copied) * N;
    T* const to = y + head * args.y_strides[2] + at;
    Pack<T, N> part = load_pack<N>(x + head * args.x_strides[2] + at);
    if (args.accumulate) {
      const Pack<T, N> before = load_pack<N>(to);
      for (int k = 0; k < N; ++k) part[k] = narrow<T>(widen(part[k]) + widen(before[k]));
    }
    store_pack<N>(to, part);
  }
}

template <typename T>
bool takes_packs(const TensorView& view, int pairs) {
  bool fits = is_aligned(view.data) && pairs % kPack<T> == 0 && view.shape[3] % kPack<T> == 0;
  for (int dim = 0; dim < 3; ++dim)
    fits = fits && (view.shape[dim] == 1 || view.strides[dim] % kPack<T> == 0);
  return fits;
}

template <typename T, int N>
void run(Context& context, const Rotary& args) {
  using A = Compute<T>;
  const TensorView &x = args.x, &y = args.y.view;
  using Shape = RotaryShape;
  const std::int64_t half = args.angles.pairs, heads = x.shape[2];
  require<Unsupported>(x.shape[0] <= Shape::kMostBatch && heads * x.shape[3] <= Shape::kMostWork,
                       "rotary: x of shape {} is more than a launch takes ([{}, T, {} / D, D])",
                       x.shape, Shape::kMostBatch, Shape::kMostWork);
  const Arguments<T> arguments{.x = static_cast<const T*>(x.data),
                               .y = static_cast<T*>(y.data),
                               .x_strides = {x.strides[0], x.strides[1], x.strides[2]},
                               .y_strides = {y.strides[0], y.strides[1], y.strides[2]},
                               .first_position = args.first_position,
                               .angles = args.angles,
                               .copied = static_cast<int>(x.shape[3] - 2 * half),
                               .heads = static_cast<int>(heads),
                               .rotated_heads = static_cast<int>(heads - args.copied_heads),
                               .inverse = args.inverse,
                               .accumulate = args.y.accumulate};
  launch(context, "rotary", rotary_kernel<T, N>,
         LaunchShape{.grid = static_cast<unsigned>(x.shape[1]),
                     .block = Shape::threads(heads * (half / N)),
                     .shared_bytes = 2 * SharedMemory::shared_bytes<A>(static_cast<int>(half)),
                     .grid_y = static_cast<unsigned>(x.shape[0])},
         arguments);
}

}  // namespace

void rotary(Context& context, const Rotary& args) {
  visit_floating(args.x.dtype, "rotary", [&]<typename T>(std::type_identity<T>) {
    const int pairs = args.angles.pairs;
    visit_pack<T>(takes_packs<T>(args.x, pairs) && takes_packs<T>(args.y.view, pairs),
                  [&]<int N>(std::integral_constant<int, N>) { run<T, N>(context, args); });
  });
}

TESSERA_CUDA_KERNEL(rotary, Rotary)

}  // namespace tessera::kernels::cuda
