// Routing of tokens to experts. Choice of experts: a thread owns a row. Grouping: a block owns an
// expert and reads all pairs twice, so that it needs no scratch memory and no atomics. Rows: a thread
// owns packs of the result, and a warp a product of two rows. Memory-bound.

#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/device/unroll.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch/experts.h"
#include "kernels/experts.h"

namespace tessera::kernels::cuda {
namespace {

/// Whether a comes before b in descending order.
template <typename A>
__device__ __forceinline__ bool is_before(A a, A b) {
  return a > b || (a != a && b == b);
}

/// Selects count times the first element that comes after the one selected before.
template <typename T>
struct TopKBody {
  const T* x;
  std::int32_t* index;
  int width, count;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t row,
                                             std::integral_constant<int, N>) const {
    const T* const from = x + row * width;
    Compute<T> bound = 0;
    int last = -1;
    TESSERA_KEEP_LOOP
    for (int j = 0; j < count; ++j) {
      Compute<T> best = 0;
      int at = -1;
      TESSERA_KEEP_LOOP
      for (int c = 0; c < width; ++c) {
        const Compute<T> value = widen(from[c]);
        const bool is_after =
            last < 0 || is_before(bound, value) || (c > last && !is_before(value, bound));
        if (!is_after || (at >= 0 && !is_before(value, best))) continue;
        best = value;
        at = c;
      }
      index[row * count + j] = last = at;
      bound = best;
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(GroupPairsShape::kThreads)
    group_pairs_kernel(const std::int32_t* experts, int pairs, std::int32_t* order,
                       std::int32_t* place, std::int32_t* offsets, T* counts) {
  constexpr int kWarps = GroupPairsShape::kThreads / kWarpSize;
  SharedMemory shared;
  const auto scratch = shared.take<int>(kWarpSize);
  const auto in_warps = shared.take<int>(kWarps);
  const int thread = static_cast<int>(threadIdx.x), expert = static_cast<int>(blockIdx.x);
  int below = 0, own = 0;
  for (int i = thread; i < pairs; i += GroupPairsShape::kThreads) {
    below += experts[i] < expert ? 1 : 0;
    own += experts[i] == expert ? 1 : 0;
  }
  below = block_reduce(below, scratch, 0, Sum{});
  own = block_reduce(own, scratch, 0, Sum{});
  if (thread == 0) {
    offsets[expert] = below;
    if (blockIdx.x + 1 == gridDim.x) offsets[expert + 1] = pairs;
    counts[expert] = static_cast<T>(own);
  }
  int next = below;
  for (int begin = 0; begin < pairs; begin += GroupPairsShape::kThreads) {
    const int i = begin + thread;
    const bool mine = i < pairs && experts[i] == expert;
    const unsigned lanes = __ballot_sync(kAllLanes, mine);
    __syncthreads();
    if (thread % kWarpSize == 0) in_warps[thread / kWarpSize] = __popc(lanes);
    __syncthreads();
    int row = next + __popc(lanes & ((1U << thread % kWarpSize) - 1));
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < thread / kWarpSize) row += in_warps[warp];
      next += in_warps[warp];
    }
    if (mine) {
      order[row] = i;
      place[i] = row;
    }
  }
}

template <typename T>
struct SpreadRowsBody {
  const T* x;
  const std::int32_t* order;
  const Compute<T>* weights;  // null: 1
  T* y;
  std::int64_t width;
  int each;
  bool accumulate;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const std::int64_t row = i / width;
    const int pair = order[row];
    const Compute<T> weight = weights == nullptr ? 1 : weights[pair];
    const auto from = load_pack<N>(x + pair / each * width + (i - row * width));
    Pack<T, N> before{}, result;
    if (accumulate) before = load_pack<N>(y + i);
    for (int k = 0; k < N; ++k) {
      Compute<T> value = weight * widen(from[k]);
      if (accumulate) value += widen(before[k]);
      result[k] = narrow<T>(value);
    }
    store_pack<N>(y + i, result);
  }
};

template <typename T>
struct CollectRowsBody {
  const T* x;
  const std::int32_t* place;
  const Compute<T>* weights;  // null: 1
  T* y;
  std::int64_t width;
  int each;
  bool accumulate;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const std::int64_t token = i / width, column = i - token * width;
    Compute<T> sums[N];
    for (int k = 0; k < N; ++k) sums[k] = accumulate ? widen(y[i + k]) : Compute<T>(0);
    for (std::int64_t pair = token * each; pair < (token + 1) * each; ++pair) {
      const auto from = load_pack<N>(x + place[pair] * width + column);
      const Compute<T> weight = weights == nullptr ? 1 : weights[pair];
      for (int k = 0; k < N; ++k) sums[k] += weight * widen(from[k]);
    }
    Pack<T, N> result;
    for (int k = 0; k < N; ++k) result[k] = narrow<T>(sums[k]);
    store_pack<N>(y + i, result);
  }
};

template <typename T>
__global__ void __launch_bounds__(RowProductsShape::kWarps* kWarpSize)
    row_products_kernel(const T* a, const T* b, const std::int32_t* place, Compute<T>* y,
                        std::int64_t width, std::int64_t pairs, int each, bool accumulate) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const std::int64_t pair = static_cast<std::int64_t>(blockIdx.x) * RowProductsShape::kWarps + warp;
  if (pair >= pairs) return;
  const T* const left = a + pair / each * width;
  const T* const right = b + place[pair] * width;
  Compute<T> sum = 0;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (std::int64_t c = lane; c < width; c += kWarpSize) sum += widen(left[c]) * widen(right[c]);
  sum = warp_reduce(sum, Sum{});
  if (lane == 0) y[pair] = accumulate ? y[pair] + sum : sum;
}

const std::int32_t* integers(const TensorView& view) {
  return static_cast<const std::int32_t*>(view.data);
}

/// Rows move in packs of 16 bytes if rows begin at such addresses.
template <typename T>
bool has_packs(const TensorView& x, const TensorView& y) {
  return is_aligned(static_cast<const T*>(x.data), static_cast<const T*>(y.data)) &&
         y.shape[1] % kPack<T> == 0;
}

}  // namespace

void top_k(Context& context, const TopK& args) {
  visit_floating(args.x.dtype, "top_k", [&]<typename T>(std::type_identity<T>) {
    const TopKBody<T> body{
        static_cast<const T*>(args.x.data), static_cast<std::int32_t*>(args.index.data),
        static_cast<int>(args.x.shape[1]), static_cast<int>(args.index.shape[1])};
    launch_elementwise<1>(context, "top_k", args.x.shape[0], false, body);
  });
}

void group_pairs(Context& context, const GroupPairs& args) {
  constexpr int kShared = SharedMemory::shared_bytes<int>(kWarpSize) +
                          SharedMemory::shared_bytes<int>(GroupPairsShape::kThreads / kWarpSize);
  visit_floating(args.counts.dtype, "group_pairs", [&]<typename T>(std::type_identity<T>) {
    if constexpr (!std::is_same_v<T, BFloat16>)
      launch(context, "group_pairs", group_pairs_kernel<T>,
             LaunchShape{static_cast<unsigned>(args.counts.shape[0]), GroupPairsShape::kThreads,
                         kShared},
             integers(args.experts), static_cast<int>(args.experts.numel()),
             static_cast<std::int32_t*>(args.order.data),
             static_cast<std::int32_t*>(args.place.data),
             static_cast<std::int32_t*>(args.offsets.data), static_cast<T*>(args.counts.data));
  });
}

void spread_rows(Context& context, const SpreadRows& args) {
  visit_floating(args.x.dtype, "spread_rows", [&]<typename T>(std::type_identity<T>) {
    const TensorView& y = args.y.view;
    const SpreadRowsBody<T> body{static_cast<const T*>(args.x.data),
                                 integers(args.order),
                                 static_cast<const Compute<T>*>(args.weights.data),
                                 static_cast<T*>(y.data),
                                 y.shape[1],
                                 static_cast<int>(y.shape[0] / args.x.shape[0]),
                                 args.y.accumulate};
    launch_elementwise<kPack<T>>(context, "spread_rows", y.numel(), has_packs<T>(args.x, y), body);
  });
}

void collect_rows(Context& context, const CollectRows& args) {
  visit_floating(args.x.dtype, "collect_rows", [&]<typename T>(std::type_identity<T>) {
    const TensorView& y = args.y.view;
    const CollectRowsBody<T> body{static_cast<const T*>(args.x.data),
                                  integers(args.place),
                                  static_cast<const Compute<T>*>(args.weights.data),
                                  static_cast<T*>(y.data),
                                  y.shape[1],
                                  static_cast<int>(args.x.shape[0] / y.shape[0]),
                                  args.y.accumulate};
    launch_elementwise<kPack<T>>(context, "collect_rows", y.numel(), has_packs<T>(args.x, y), body);
  });
}

void row_products(Context& context, const RowProducts& args) {
  visit_floating(args.a.dtype, "row_products", [&]<typename T>(std::type_identity<T>) {
    const std::int64_t pairs = args.b.shape[0];
    launch(context, "row_products", row_products_kernel<T>,
           LaunchShape{RowProductsShape::blocks(pairs), RowProductsShape::kWarps * kWarpSize},
           static_cast<const T*>(args.a.data), static_cast<const T*>(args.b.data),
           integers(args.place), static_cast<Compute<T>*>(args.y.view.data), args.a.shape[1], pairs,
           static_cast<int>(pairs / args.a.shape[0]), args.y.accumulate);
  });
}

TESSERA_CUDA_KERNEL(top_k, TopK)
TESSERA_CUDA_KERNEL(group_pairs, GroupPairs)
TESSERA_CUDA_KERNEL(spread_rows, SpreadRows)
TESSERA_CUDA_KERNEL(collect_rows, CollectRows)
TESSERA_CUDA_KERNEL(row_products, RowProducts)

}  // namespace tessera::kernels::cuda
