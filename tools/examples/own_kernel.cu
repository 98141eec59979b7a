// y = x^3, one element per thread. Compiled by nvcc, and as C++ for the host by tessera_compile_on_host.
#include <tessera/extend.h>

namespace ts = tessera;
namespace cuda = tessera::kernels::cuda;

template <typename T>
__global__ void cube_kernel(std::int64_t n, const T* x, T* y) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride)
    y[i] = x[i] * x[i] * x[i];
}

template <typename T>
__global__ void cube_backward_kernel(std::int64_t n, const T* x, const T* dy, T* dx, bool add) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride)
    dx[i] = 3 * x[i] * x[i] * dy[i] + (add ? dx[i] : T(0));
}

cuda::LaunchShape shape_for(std::int64_t n) {
  return {.grid = static_cast<unsigned>((n + 255) / 256), .block = 256};
}

template <typename T>
void launch_cube(ts::Context& context, const ts::TensorView& x, const ts::TensorView& y) {
  cuda::launch(context, "cube", cube_kernel<T>, shape_for(x.numel()), x.numel(), x.as<T>(),
               y.as<T>());
}

template <typename T>
void launch_cube_backward(ts::Context& context, const ts::TensorView& x, const ts::TensorView& dy,
                          const ts::GradientView& dx) {
  cuda::launch(context, "cube_backward", cube_backward_kernel<T>, shape_for(x.numel()), x.numel(),
               x.as<T>(), dy.as<T>(), dx.view.as<T>(), dx.accumulate);
}

template void launch_cube<float>(ts::Context&, const ts::TensorView&, const ts::TensorView&);
template void launch_cube<double>(ts::Context&, const ts::TensorView&, const ts::TensorView&);
template void launch_cube_backward<float>(ts::Context&, const ts::TensorView&,
                                          const ts::TensorView&, const ts::GradientView&);
template void launch_cube_backward<double>(ts::Context&, const ts::TensorView&,
                                           const ts::TensorView&, const ts::GradientView&);
