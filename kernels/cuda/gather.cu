// Gathering along a dim: a thread owns an element. Its gradient: a thread owns a line along the dim,
// so that sums have a fixed order. Memory-bound.

#include <limits>

#include "kernels/cuda/strided.h"
#include "kernels/gather.h"

namespace tessera::kernels::cuda {
namespace {

template <typename T>
struct GatherBody {
  const T* x;
  const std::int32_t* index;
  T* y;
  StridedLoop loop;
  std::int64_t size, step;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const std::int64_t at = index[offset_of(loop, 1, i)];
    T* const to = y + offset_of(loop, 2, i);
    if (at >= 0 && at < size)
      *to = x[offset_of(loop, 0, i) + at * step];
    else
      *to = narrow<T>(std::numeric_limits<Compute<T>>::quiet_NaN());
  }
};

template <typename T>
struct ScatterAddBody {
  const T* y;
  const std::int32_t* index;
  Compute<T>* x;
  StridedLoop lines;
  std::int64_t size, step, count, index_step, y_step;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    Compute<T>* const to = x + offset_of(lines, 0, i);
    const std::int32_t* const at_line = index + offset_of(lines, 1, i);
    const T* const from = y + offset_of(lines, 2, i);
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t at = at_line[j * index_step];
      if (at >= 0 && at < size) to[at * step] += widen(from[j * y_step]);
    }
  }
};

}  // namespace

void gather(Context& context, const Gather& args) {
  TensorView lines = args.x;  // x without dim, which the index replaces
  lines.shape = args.index.shape;
  lines.strides[args.dim] = 0;
  visit_floating(args.x.dtype, "gather", [&]<typename T>(std::type_identity<T>) {
    const GatherBody<T> body{static_cast<const T*>(args.x.data),
                             static_cast<const std::int32_t*>(args.index.data),
                             static_cast<T*>(args.y.data),
                             strided_loop({&lines, &args.index, &args.y}),
                             args.x.shape[args.dim],
                             args.x.strides[args.dim]};
    launch_elementwise<1>(context, "gather", body.loop.count(), false, body);
  });
}

void scatter_add(Context& context, const ScatterAdd& args) {
  TensorView x_lines = args.x;
  x_lines.shape = args.index.shape;
  x_lines = first_along(x_lines, args.dim);
  const TensorView index_lines = first_along(args.index, args.dim);
  const TensorView y_lines = first_along(args.y, args.dim);
  visit_floating(args.y.dtype, "scatter_add", [&]<typename T>(std::type_identity<T>) {
    const ScatterAddBody<T> body{static_cast<const T*>(args.y.data),
                                 static_cast<const std::int32_t*>(args.index.data),
                                 static_cast<Compute<T>*>(args.x.data),
                                 strided_loop({&x_lines, &index_lines, &y_lines}),
                                 args.x.shape[args.dim],
                                 args.x.strides[args.dim],
                                 args.index.shape[args.dim],
                                 args.index.strides[args.dim],
                                 args.y.strides[args.dim]};
    launch_elementwise<1>(context, "scatter_add", body.lines.count(), false, body);
  });
}

TESSERA_CUDA_KERNEL(gather, Gather)
TESSERA_CUDA_KERNEL(scatter_add, ScatterAdd)

}  // namespace tessera::kernels::cuda
