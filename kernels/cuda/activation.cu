#include "kernels/activation.h"
#include "kernels/cuda/elementwise.h"

namespace tessera::kernels::cuda {
namespace {

// As in kernels/cpu/activation.cpp: with s = 1 / (1 + e^(-2u)), y = x s, and dy/dx = s + 2 x u' s
// (1 - s). Beyond the clamp s is below 1e-33 or equal to 1.
template <typename A>
struct Gelu {
  A logistic, complement, slope;

  __device__ __forceinline__ explicit Gelu(A x) {
    constexpr A kAlpha = A(0.7978845608028654);  // sqrt(2 / pi)
    constexpr A kBeta = A(0.044715);
    constexpr A kClamp = A(9.5);
    A bounded = x < -kClamp ? -kClamp : x;
    bounded = bounded > kClamp ? kClamp : bounded;
    const A square = bounded * bounded;
    const A u = kAlpha * bounded * (A(1) + kBeta * square);
    const A power = std::exp(A(-2) * u);
    logistic = A(1) / (A(1) + power);
    complement = power * logistic;
    slope = A(2) * kAlpha * bounded * (A(1) + A(3) * kBeta * square);
  }
};

template <typename T>
struct GeluForwardBody {
  const T* x;
  T* y;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const Pack<T, N> in = load_pack<N>(x + i);
    Pack<T, N> out;
    for (int k = 0; k < N; ++k) {
      const auto value = widen(in[k]);
      out[k] = narrow<T>(value * Gelu<Compute<T>>(value).logistic);
    }
    store_pack<N>(y + i, out);
  }
};

template <typename T, bool kAccumulate>
struct GeluBackwardBody {
  const T* x;
  const T* grad_y;
  T* grad_x;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const Pack<T, N> in = load_pack<N>(x + i);
    const Pack<T, N> upstream = load_pack<N>(grad_y + i);
    Pack<T, N> out;
    if constexpr (kAccumulate) out = load_pack<N>(grad_x + i);
    for (int k = 0; k < N; ++k) {
      const Gelu<Compute<T>> g(widen(in[k]));
      auto grad = widen(upstream[k]) * (g.logistic + g.slope * (g.logistic * g.complement));
      if constexpr (kAccumulate) grad += widen(out[k]);
      out[k] = narrow<T>(grad);
    }
    store_pack<N>(grad_x + i, out);
  }
};

}  // namespace

void gelu_forward(Context& context, const GeluForward& args) {
  visit_floating(args.x.dtype, "gelu_forward", [&]<typename T>(std::type_identity<T>) {
    const GeluForwardBody<T> body{static_cast<const T*>(args.x.data), static_cast<T*>(args.y.data)};
    launch_elementwise<kPack<T>>(context, "gelu_forward", args.x.numel(),
                                 is_aligned(body.x) && is_aligned(body.y), body);
  });
}

void gelu_backward(Context& context, const GeluBackward& args) {
  visit_floating(args.x.dtype, "gelu_backward", [&]<typename T>(std::type_identity<T>) {
    const auto run = [&]<bool accumulate>(std::bool_constant<accumulate>) {
      const GeluBackwardBody<T, accumulate> body{static_cast<const T*>(args.x.data),
                                                 static_cast<const T*>(args.grad_y.data),
                                                 static_cast<T*>(args.grad_x.view.data)};
      launch_elementwise<kPack<T>>(
          context, "gelu_backward", args.x.numel(),
          is_aligned(body.x) && is_aligned(body.grad_y) && is_aligned(body.grad_x), body);
    };
    if (args.grad_x.accumulate)
      run(std::true_type{});
    else
      run(std::false_type{});
  });
}

TESSERA_CUDA_KERNEL(gelu_forward, GeluForward)
TESSERA_CUDA_KERNEL(gelu_backward, GeluBackward)

}  // namespace tessera::kernels::cuda
