#include <cmath>
#include <limits>
#include <type_traits>

#include "core/base/context.h"
#include "kernels/cross_entropy.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/cross_entropy.h"

namespace tessera::kernels::cuda {
namespace {

/// Soft cap of logits; none if kCapped is false.
template <bool kCapped, typename A>
struct Cap {
  A cap, inverse;
  __device__ __forceinline__ A operator()(A logit) const {
    if constexpr (kCapped) return cap * std::tanh(logit * inverse);
    return logit;
  }
  /// Derivative at the logit whose capped value is c.
  __device__ __forceinline__ A slope(A c) const {
    if constexpr (kCapped) return A(1) - c * inverse * (c * inverse);
    return A(1);
  }
};

/// e^x; for floats by a power of 2, with an error of 2 ulp and of x log2(e)'s rounding.
__device__ __forceinline__ double exponential(double x) { return std::exp(x); }
__device__ __forceinline__ float exponential(float x) { return fast_exp2(x * kLog2E); }

// Running maximum and sum of exp(element - maximum), in one pass (arXiv:1805.02867). The maximum
// starts at the lowest finite number, so that a thread that saw only -inf, or nothing, adds 0.
template <bool kCapped, typename A>
struct OnlineSoftmax {
  Cap<kCapped, A> cap;
  A maximum = std::numeric_limits<A>::lowest();
  A sum = 0;

  template <int N, typename T>
  __device__ __forceinline__ void add(const Pack<T, N>& logits) {
    A values[N];
    for (int k = 0; k < N; ++k) values[k] = cap(widen(logits[k]));
    A highest = values[0];
    for (int k = 1; k < N; ++k) highest = std::fmax(values[k], highest);
    if (highest > maximum) {
      sum *= exponential(maximum - highest);
      maximum = highest;
    }
    for (int k = 0; k < N; ++k) sum += exponential(values[k] - maximum);
  }
};

template <bool kCapped, typename T>
struct RowGradient {
  Cap<kCapped, Compute<T>> cap;
  Compute<T> maximum, factor, at_target;
  int target;

  /// Writes the gradients of logits i, i + 1, ...
  template <int N>
  __device__ __forceinline__ void write(T* row, int i, const Pack<T, N>& pack) const {
    Compute<T> logits[N], gradients[N];
    for (int k = 0; k < N; ++k) {
      logits[k] = cap(widen(pack[k]));
      gradients[k] = exponential(logits[k] - maximum) * factor;
    }
    if (target >= i && target < i + N)
      for (int k = 0; k < N; ++k) gradients[k] -= i + k == target ? at_target : Compute<T>(0);
    if constexpr (kCapped)
      for (int k = 0; k < N; ++k) gradients[k] *= cap.slope(logits[k]);
    store_pack<N>(row + i, narrow_pack<T>(gradients));
  }
};

// A block owns a row: single elements up to the first multiple of 16 bytes, then packs, then the
// single elements that remain. Memory-bound: reads each logit once and writes its gradient once.
// With kKeepRow, shared memory keeps the packs for the second pass, each thread its own. Otherwise
// that pass runs backwards, so that most of its reads hit the caches.
template <typename T, bool kWriteGradient, bool kCapped, bool kKeepRow>
__global__ void __launch_bounds__(CrossEntropyShape::most_threads(sizeof(T)))
    cross_entropy_kernel(T* logits, std::int64_t stride, int columns, const std::int32_t* targets,
                         Compute<T>* losses, Compute<T> grad_scale, Cap<kCapped, Compute<T>> cap) {
  using A = Compute<T>;
  constexpr int N = kPack<T>;
  SharedMemory shared;
  const auto scratch = shared.take<A>(kWarpSize);
  T* row = logits + static_cast<std::int64_t>(blockIdx.x) * stride;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int target = targets[blockIdx.x];
  if (target == kIgnoreTarget) {
    if (thread == 0) losses[blockIdx.x] = 0;
    if constexpr (kWriteGradient)
      for (int i = thread; i < columns; i += threads) row[i] = narrow<T>(A(0));
    return;
  }
  const auto misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) / sizeof(T) % N);
  const int to_boundary = (N - misaligned) % N;
  const int head = to_boundary < columns ? to_boundary : columns;
  const int packs = (columns - head) / N;
  const int tail = head + packs * N;
  const bool known = target >= 0 && target < columns;
  const A nan = std::numeric_limits<A>::quiet_NaN();
  // Read before the first barrier, because other threads overwrite the row after the last one.
  const A target_logit = known ? cap(widen(row[target])) : nan;
  const auto kept = shared.take<T>(kKeepRow ? packs * N : 0);

  OnlineSoftmax<kCapped, A> own{cap};
  if (thread < head) own.add(load_pack<1>(row + thread));
  for (int p = thread; p < packs; p += threads) {
    const Pack<T, N> pack = load_pack<N>(row + head + p * N);
    if constexpr (kKeepRow) kept.template store<N>(p * N, pack);
    own.add(pack);
  }
  if (tail + thread < columns) own.add(load_pack<1>(row + tail + thread));

  const A maximum = block_reduce(own.maximum, scratch, std::numeric_limits<A>::lowest(), Maximum{});
  const A sum = block_reduce(own.sum * exponential(own.maximum - maximum), scratch, A(0), Sum{});
  if (thread == 0) losses[blockIdx.x] = std::log(sum) + (maximum - target_logit);

  if constexpr (kWriteGradient) {
    const A scale = known ? grad_scale : nan;
    const RowGradient<kCapped, T> gradient{cap, maximum, scale / sum, scale, target};
    const auto write = [&]<int kWidth>(std::integral_constant<int, kWidth>, int i) {
      gradient.template write<kWidth>(row, i, load_pack<kWidth>(row + i));
    };
    constexpr std::integral_constant<int, 1> kSingle{};
    if (tail + thread < columns) write(kSingle, tail + thread);
    if (thread < packs) {
      for (int p = thread + (packs - 1 - thread) / threads * threads; p >= 0; p -= threads) {
        if constexpr (kKeepRow)
          gradient.template write<N>(row, head + p * N, kept.template load<N>(p * N));
        else
          write(std::integral_constant<int, N>{}, head + p * N);
      }
    }
    if (thread < head) write(kSingle, thread);
  }
}

template <typename T, bool kCapped>
void run(Context& context, const CrossEntropy& args) {
  using A = Compute<T>;
  const TensorView& logits = args.logits;
  const std::int64_t rows = logits.shape[0], columns = logits.shape[1];
  require<Unsupported>(columns <= CrossEntropyShape::kMostColumns &&
                           rows <= std::numeric_limits<std::int32_t>::max(),
                       "cross_entropy: logits of shape {} are more than a launch takes ({} rows, "
                       "{} columns)",
                       logits.shape, std::numeric_limits<std::int32_t>::max(),
                       CrossEntropyShape::kMostColumns);
  int shared_bytes = SharedMemory::shared_bytes<A>(kWarpSize);
  auto kernel = cross_entropy_kernel<T, false, kCapped, false>;
  if (args.write_gradient) {
    const std::int64_t row_bytes = columns * static_cast<std::int64_t>(sizeof(T)) + 15;
    const bool keep = CrossEntropyShape::keeps(shared_bytes + row_bytes, context.limits());
    kernel = keep ? cross_entropy_kernel<T, true, kCapped, true>
                  : cross_entropy_kernel<T, true, kCapped, false>;
    if (keep) shared_bytes += SharedMemory::shared_bytes<T>(static_cast<int>(columns));
  }
  launch(context, "cross_entropy", kernel,
         LaunchShape{static_cast<unsigned>(rows), CrossEntropyShape::threads(columns, sizeof(T)),
                     shared_bytes},
         static_cast<T*>(logits.data), logits.strides[0], static_cast<int>(columns),
         static_cast<const std::int32_t*>(args.targets.data), static_cast<A*>(args.losses.data),
         static_cast<A>(args.grad_scale),
         Cap<kCapped, A>{static_cast<A>(args.softcap), static_cast<A>(1.0 / args.softcap)});
}

}  // namespace

void cross_entropy(Context& context, const CrossEntropy& args) {
  visit_floating(args.logits.dtype, "cross_entropy", [&]<typename T>(std::type_identity<T>) {
    args.softcap > 0.0 ? run<T, true>(context, args) : run<T, false>(context, args);
  });
}

TESSERA_CUDA_KERNEL(cross_entropy, CrossEntropy)

}  // namespace tessera::kernels::cuda
