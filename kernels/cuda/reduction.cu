// Sums over some dims, and the largest element along a dim. Memory-bound.

#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/launch/reduction.h"
#include "kernels/cuda/strided.h"
#include "kernels/reduction.h"

namespace tessera::kernels::cuda {
namespace {

// A block owns a sum at a time: its threads stride over the terms.
template <typename T, typename Out>
__global__ void __launch_bounds__(SumToShape::kMostThreads)
    sum_to_kernel(const T* in, Out* out, StridedLoop kept, StridedLoop summed, std::int64_t sums,
                  std::int64_t terms, double scale, bool accumulate) {
  SharedMemory shared;
  const auto scratch = shared.take<double>(kWarpSize);
  for (std::int64_t s = blockIdx.x; s < sums; s += gridDim.x) {
    const T* const first = in + offset_of(kept, 0, s);
    double sum = 0;
    for (std::int64_t i = threadIdx.x; i < terms; i += blockDim.x)
      sum += static_cast<double>(widen(first[offset_of(summed, 0, i)]));
    sum = block_reduce(sum, scratch, 0.0, Sum{});
    if (threadIdx.x != 0) continue;
    Out* const to = out + offset_of(kept, 1, s);
    double value = scale * sum;
    if (accumulate) value += static_cast<double>(widen(*to));
    *to = narrow<Out>(static_cast<Compute<Out>>(value));
  }
}

template <typename T, typename Out>
void run(Context& context, const SumTo& args) {
  const SumToLoops loops(args);
  const StridedLoop kept = strided_loop({&loops.kept.in, &loops.kept.out});
  const StridedLoop summed = strided_loop({&loops.summed.in});
  launch(context, "sum_to", sum_to_kernel<T, Out>,
         LaunchShape{SumToShape::blocks(kept.count()), SumToShape::threads(summed.count()),
                     SharedMemory::shared_bytes<double>(kWarpSize)},
         static_cast<const T*>(args.in.data), static_cast<Out*>(args.out.view.data), kept, summed,
         kept.count(), summed.count(), args.scale, args.out.accumulate);
}

/// A thread owns a result.
template <typename T>
struct MaxBody {
  const T* in;
  T* values;
  std::int32_t* indices;
  std::int64_t count, inner;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const T* const first = in + i / inner * count * inner + i % inner;
    std::int64_t best = 0;
    Compute<T> highest = widen(*first);
    for (std::int64_t k = 1; k < count && highest == highest; ++k) {
      const Compute<T> value = widen(first[k * inner]);
      if (value > highest || value != value) {
        highest = value;
        best = k;
      }
    }
    if (values != nullptr) values[i] = first[best * inner];
    if (indices != nullptr) indices[i] = static_cast<std::int32_t>(best);
  }
};

}  // namespace

void sum_to(Context& context, const SumTo& args) {
  visit_floating(args.in.dtype, "sum_to", [&]<typename T>(std::type_identity<T>) {
    if (args.out.view.dtype == args.in.dtype)
      run<T, T>(context, args);
    else
      run<T, Compute<T>>(context, args);
  });
}

void max_along(Context& context, const MaxAlong& args) {
  visit_floating(args.in.dtype, "max_along", [&]<typename T>(std::type_identity<T>) {
    const MaxBody<T> body{static_cast<const T*>(args.in.data), static_cast<T*>(args.values.data),
                          static_cast<std::int32_t*>(args.indices.data), args.in.shape[1],
                          args.in.shape[2]};
    launch_elementwise<1>(context, "max_along", args.in.shape[0] * args.in.shape[2], false, body);
  });
}

TESSERA_CUDA_KERNEL(sum_to, SumTo)
TESSERA_CUDA_KERNEL(max_along, MaxAlong)

}  // namespace tessera::kernels::cuda
