// An operation with a CUDA kernel of one's own, and a check of its gradients on the device.
// Usage: own_kernel [PLUGIN]; libtessera_cuda_fiber.so runs CUDA kernels on the host.
#include <tessera/extend.h>
#include <tessera/tessera.h>
#include <tessera/testing.h>

#include <cstdio>
#include <vector>

namespace ts = tessera;
using ts::Tensor;

template <typename T>  // own_kernel.cu
void launch_cube(ts::Context& context, const ts::TensorView& x, const ts::TensorView& y);
template <typename T>
void launch_cube_backward(ts::Context& context, const ts::TensorView& x, const ts::TensorView& dy,
                          const ts::GradientView& dx);

/// x^3. @param x  f32 or f64, contiguous, on a CUDA device
template <typename T>
Tensor cube(const Tensor& x) {
  ts::ops::check_dtype("cube", "x", x, ts::dtype_of<T>());
  ts::ops::check_contiguous("cube", "x", x);
  Tensor y = Tensor::empty(x.context(), x.shape(), x.dtype());
  launch_cube<T>(*x.context(), x.view(), y.view());
  ts::autograd::record(
      "cube", y, {x}, [x = ts::autograd::SavedTensor(x)](const Tensor& dy, auto& into) {
        if (const ts::GradientView dx = into.target(0))  // where the gradient belongs
          launch_cube_backward<T>(*dy.context(), x.get("cube").view(), dy.view(), dx);
      });
  return y;
}

int main(int argc, char** argv) try {
  const auto context =
      ts::Context::create({.device = {ts::DeviceType::CUDA, 0}, .plugin = argc > 1 ? argv[1] : ""});
  const auto y = cube<float>(Tensor::from(context, {1, 2, 3}));
  auto x = Tensor::from(context, {{0.5, -1, 2}, {1, 0.25, -3}}, ts::DType::F64);
  x.set_requires_grad(true);
  const auto result =
      ts::testing::gradcheck([](const auto& in) { return cube<double>(in[0]); }, {x});
  std::printf("own_kernel: %s, %s\n", ts::to_string(y).c_str(), result.str().c_str());
  return result.ok() && y.to_vector<float>() == std::vector<float>{1, 8, 27} ? 0 : 1;
} catch (const ts::Error& error) {
  std::fprintf(stderr, "own_kernel: %s\n", error.what());
  return 1;
}
