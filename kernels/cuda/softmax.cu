// Softmax over the rows of a matrix: a block owns a row. Memory-bound: forward reads a row three
// times, mostly from caches.

#include <cmath>
#include <limits>

#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/softmax.h"
#include "kernels/softmax.h"

namespace tessera::kernels::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(SoftmaxShape::kMostThreads)
    softmax_forward_kernel(const T* x, T* y, std::int64_t width, bool log) {
  using A = Compute<T>;
  SharedMemory shared;
  const auto scratch = shared.take<A>(kWarpSize);
  const T* const row = x + static_cast<std::int64_t>(blockIdx.x) * width;
  T* const out = y + static_cast<std::int64_t>(blockIdx.x) * width;
  A highest = -std::numeric_limits<A>::infinity();
  for (std::int64_t i = threadIdx.x; i < width; i += blockDim.x)
    highest = Maximum{}(highest, static_cast<A>(widen(row[i])));
  highest = block_reduce(highest, scratch, -std::numeric_limits<A>::infinity(), Maximum{});
  A sum = 0;
  for (std::int64_t i = threadIdx.x; i < width; i += blockDim.x)
    sum += std::exp(widen(row[i]) - highest);
  sum = block_reduce(sum, scratch, A(0), Sum{});
  const A log_sum = std::log(sum), factor = A(1) / sum;
  for (std::int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    const A shifted = widen(row[i]) - highest;
    out[i] = narrow<T>(log ? shifted - log_sum : std::exp(shifted) * factor);
  }
}

template <typename T>
__global__ void __launch_bounds__(SoftmaxShape::kMostThreads)
    softmax_backward_kernel(const T* y, const T* grad_y, T* grad_x, std::int64_t width, bool log,
                            bool accumulate) {
  using A = Compute<T>;
  SharedMemory shared;
  const auto scratch = shared.take<A>(kWarpSize);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * width;
  A sum = 0;
  for (std::int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    const A grad = widen(grad_y[first + i]);
    sum += log ? grad : grad * widen(y[first + i]);
  }
  sum = block_reduce(sum, scratch, A(0), Sum{});
  for (std::int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    const A grad = widen(grad_y[first + i]), kept = widen(y[first + i]);
    A value = log ? grad - std::exp(kept) * sum : kept * (grad - sum);
    if (accumulate) value += widen(grad_x[first + i]);
    grad_x[first + i] = narrow<T>(value);
  }
}

/// A block for each row of [R, C].
template <typename T>
LaunchShape launch_rows(const char* name, const Shape& shape) {
  require<Unsupported>(shape[0] <= SoftmaxShape::kMostRows,
                       "{}: {} rows are more than a launch takes ({})", name, shape[0],
                       SoftmaxShape::kMostRows);
  return {.grid = static_cast<unsigned>(shape[0]),
          .block = SoftmaxShape::threads(shape[1]),
          .shared_bytes = SharedMemory::shared_bytes<Compute<T>>(kWarpSize)};
}

}  // namespace

void softmax_forward(Context& context, const SoftmaxForward& args) {
  visit_floating(args.x.dtype, "softmax_forward", [&]<typename T>(std::type_identity<T>) {
    launch(context, "softmax_forward", softmax_forward_kernel<T>,
           launch_rows<T>("softmax_forward", args.x.shape), static_cast<const T*>(args.x.data),
           static_cast<T*>(args.y.data), args.x.shape[1], args.log);
  });
}

void softmax_backward(Context& context, const SoftmaxBackward& args) {
  visit_floating(args.y.dtype, "softmax_backward", [&]<typename T>(std::type_identity<T>) {
    launch(context, "softmax_backward", softmax_backward_kernel<T>,
           launch_rows<T>("softmax_backward", args.y.shape), static_cast<const T*>(args.y.data),
           static_cast<const T*>(args.grad_y.data), static_cast<T*>(args.grad_x.view.data),
           args.y.shape[1], args.log, args.grad_x.accumulate);
  });
}

TESSERA_CUDA_KERNEL(softmax_forward, SoftmaxForward)
TESSERA_CUDA_KERNEL(softmax_backward, SoftmaxBackward)

}  // namespace tessera::kernels::cuda
