#include <cmath>

#include "kernels/activation.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch/rows.h"

namespace tessera::kernels::cuda {
namespace {

// GELU in its tanh form, with u the argument of tanh, as in kernels/cpu/activation.cpp. With
// s = 1 / (1 + e^(-2u)): y = x s, and dy/dx = s + 2 x u' s (1 - s). x is clamped for u alone: beyond
// kClamp, s is below 1e-33 or equal to 1.
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

template <typename T>
struct GeluBackwardBody {
  const T* x;
  const T* grad_y;
  T* grad_x;
  bool accumulate;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const Pack<T, N> in = load_pack<N>(x + i);
    const Pack<T, N> upstream = load_pack<N>(grad_y + i);
    Pack<T, N> out{};
    if (accumulate) out = load_pack<N>(grad_x + i);
    for (int k = 0; k < N; ++k) {
      const Gelu<Compute<T>> g(widen(in[k]));
      auto grad = widen(upstream[k]) * (g.logistic + g.slope * (g.logistic * g.complement));
      if (accumulate) grad += widen(out[k]);
      out[k] = narrow<T>(grad);
    }
    store_pack<N>(grad_x + i, out);
  }
};

template <GatedKind kind, typename A>
struct Activation {
  A value, derivative;

  __device__ __forceinline__ explicit Activation(A x) {
    if constexpr (kind == GatedKind::GeGlu) {
      const Gelu<A> g(x);
      value = x * g.logistic;
      derivative = g.logistic + g.slope * (g.logistic * g.complement);
    } else {
      // As in kernels/cpu/activation.cpp, with s = 1 / (1 + e^(-x)).
      constexpr A kClamp = A(80);
      const A above = x < -kClamp ? -kClamp : x;
      const A bounded = above > kClamp ? kClamp : above;
      const A power = std::exp(-bounded);
      const A s = A(1) / (A(1) + power);
      value = above * s;
      derivative = s + bounded * (s * (power * s));
    }
  }
};

/// A matrix with strided rows; null for a gradient that is not needed.
template <typename T>
struct Rows {
  T* data;
  std::int64_t stride;
  __device__ __forceinline__ T* at(std::int64_t row, std::int64_t column) const {
    return data + row * stride + column;
  }
};

// Memory-bound: moves 3 elements per element of y, backward 5.
template <GatedKind kind, typename T, int N>
__global__ void __launch_bounds__(RowsShape::kMostThreads)
    gated_forward_kernel(std::int64_t packs, Rows<const T> gate, Rows<const T> up, Rows<T> y) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * blockDim.x;
  for (std::int64_t p = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; p < packs;
       p += step) {
    const Pack<T, N> in = load_pack<N>(gate.at(row, p * N));
    const Pack<T, N> factor = load_pack<N>(up.at(row, p * N));
    Pack<T, N> out;
    for (int k = 0; k < N; ++k)
      out[k] = narrow<T>(Activation<kind, Compute<T>>(widen(in[k])).value * widen(factor[k]));
    store_pack<N>(y.at(row, p * N), out);
  }
}

template <typename T>
struct GatedGradients {
  Rows<T> gate, up;
  bool add_to_gate, add_to_up;
};

template <GatedKind kind, typename T, int N>
__global__ void __launch_bounds__(RowsShape::kMostThreads)
    gated_backward_kernel(std::int64_t packs, Rows<const T> gate, Rows<const T> up,
                          Rows<const T> grad_y, GatedGradients<T> gradients) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * blockDim.x;
  for (std::int64_t p = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; p < packs;
       p += step) {
    const Pack<T, N> in = load_pack<N>(gate.at(row, p * N));
    const Pack<T, N> factor = load_pack<N>(up.at(row, p * N));
    const Pack<T, N> upstream = load_pack<N>(grad_y.at(row, p * N));
    Pack<T, N> of_gate{}, of_up{};
    if (gradients.gate.data != nullptr && gradients.add_to_gate)
      of_gate = load_pack<N>(gradients.gate.at(row, p * N));
    if (gradients.up.data != nullptr && gradients.add_to_up)
      of_up = load_pack<N>(gradients.up.at(row, p * N));
    for (int k = 0; k < N; ++k) {
      const Activation<kind, Compute<T>> at(widen(in[k]));
      const Compute<T> grad = widen(upstream[k]);
      of_gate[k] = narrow<T>(grad * widen(factor[k]) * at.derivative + widen(of_gate[k]));
      of_up[k] = narrow<T>(grad * at.value + widen(of_up[k]));
    }
    if (gradients.gate.data != nullptr) store_pack<N>(gradients.gate.at(row, p * N), of_gate);
    if (gradients.up.data != nullptr) store_pack<N>(gradients.up.at(row, p * N), of_up);
  }
}

LaunchShape launch_rows(const char* name, std::int64_t rows, std::int64_t packs) {
  require<Unsupported>(rows <= RowsShape::kMostRows,
                       "{}: {} rows are more than a launch takes ({})", name, rows,
                       RowsShape::kMostRows);
  const RowsShape shape(packs);
  return {.grid = static_cast<unsigned>(rows), .block = shape.threads, .grid_y = shape.parts};
}

template <typename T>
Rows<T> rows_of(const TensorView& view) {
  return {static_cast<T*>(view.data), view.defined() ? view.strides[0] : 0};
}

/// Whether all rows begin at a multiple of 16 bytes.
template <typename T>
bool takes_packs(const Rows<T>& rows) {
  return is_aligned(rows.data) && rows.stride % kPack<std::remove_const_t<T>> == 0;
}

/// Calls f with the kind, the dtype and the pack size as types; `views` are all operands.
template <typename F>
void visit_gated(GatedKind kind, const TensorView& gate,
                 std::initializer_list<const TensorView*> views, const char* name, const F& f) {
  visit_floating(gate.dtype, name, [&]<typename T>(std::type_identity<T>) {
    bool packs = gate.shape[1] % kPack<T> == 0;
    for (const TensorView* view : views) packs = packs && takes_packs(rows_of<const T>(*view));
    const auto with_kind = [&](auto which) {
      visit_pack<T>(packs, [&](auto pack) { f(which, std::type_identity<T>{}, pack); });
    };
    if (kind == GatedKind::SwiGlu)
      with_kind(std::integral_constant<GatedKind, GatedKind::SwiGlu>{});
    else
      with_kind(std::integral_constant<GatedKind, GatedKind::GeGlu>{});
  });
}

}  // namespace

void gelu_forward(Context& context, const GeluForward& args) {
  visit_floating(args.x.dtype, "gelu_forward", [&]<typename T>(std::type_identity<T>) {
    const GeluForwardBody<T> body{static_cast<const T*>(args.x.data), static_cast<T*>(args.y.data)};
    launch_elementwise<kPack<T>>(context, "gelu_forward", args.x.numel(),
                                 is_aligned(body.x, body.y), body);
  });
}

void gelu_backward(Context& context, const GeluBackward& args) {
  visit_floating(args.x.dtype, "gelu_backward", [&]<typename T>(std::type_identity<T>) {
    const GeluBackwardBody<T> body{static_cast<const T*>(args.x.data),
                                   static_cast<const T*>(args.grad_y.data),
                                   static_cast<T*>(args.grad_x.view.data), args.grad_x.accumulate};
    launch_elementwise<kPack<T>>(context, "gelu_backward", args.x.numel(),
                                 is_aligned(body.x, body.grad_y, body.grad_x), body);
  });
}

void gated_forward(Context& context, const GatedForward& args) {
  constexpr auto kName = "gated_forward";
  visit_gated(args.kind, args.gate, {&args.gate, &args.up, &args.y}, kName,
              [&]<GatedKind kind, typename T, int N>(std::integral_constant<GatedKind, kind>,
                                                     std::type_identity<T>,
                                                     std::integral_constant<int, N>) {
                const std::int64_t packs = args.gate.shape[1] / N;
                launch(context, kName, gated_forward_kernel<kind, T, N>,
                       launch_rows(kName, args.gate.shape[0], packs), packs,
                       rows_of<const T>(args.gate), rows_of<const T>(args.up), rows_of<T>(args.y));
              });
}

void gated_backward(Context& context, const GatedBackward& args) {
  constexpr auto kName = "gated_backward";
  visit_gated(args.kind, args.gate,
              {&args.gate, &args.up, &args.grad_y, &args.grad_gate.view, &args.grad_up.view}, kName,
              [&]<GatedKind kind, typename T, int N>(std::integral_constant<GatedKind, kind>,
                                                     std::type_identity<T>,
                                                     std::integral_constant<int, N>) {
                const std::int64_t packs = args.gate.shape[1] / N;
                const GatedGradients<T> gradients{
                    rows_of<T>(args.grad_gate.view), rows_of<T>(args.grad_up.view),
                    args.grad_gate.accumulate, args.grad_up.accumulate};
                launch(context, kName, gated_backward_kernel<kind, T, N>,
                       launch_rows(kName, args.gate.shape[0], packs), packs,
                       rows_of<const T>(args.gate), rows_of<const T>(args.up),
                       rows_of<const T>(args.grad_y), gradients);
              });
}

TESSERA_CUDA_KERNEL(gelu_forward, GeluForward)
TESSERA_CUDA_KERNEL(gelu_backward, GeluBackward)
TESSERA_CUDA_KERNEL(gated_forward, GatedForward)
TESSERA_CUDA_KERNEL(gated_backward, GatedBackward)

}  // namespace tessera::kernels::cuda
