#include "kernels/activation.h"

#include "kernels/cpu/gelu.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

template <typename T>
void forward(Context& context, const GeluForward& args) {
  const auto* x = static_cast<const T*>(args.x.data);
  auto* y = static_cast<T*>(args.y.data);
  for_elements(context, args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
    gelu(x + begin, y + begin, end - begin);
  });
}

template <typename T, bool kAccumulate>
void backward(Context& context, const GeluBackward& args) {
  const auto* x = static_cast<const T*>(args.x.data);
  const auto* grad_y = static_cast<const T*>(args.grad_y.data);
  auto* grad_x = static_cast<T*>(args.grad_x.view.data);
  for_elements(context, args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
    gelu_gradient<kAccumulate>(x + begin, grad_y + begin, grad_x + begin, end - begin);
  });
}

template <typename A>
struct Activation {
  A value, derivative;
};

template <GatedKind kind, typename A>
inline Activation<A> activate(A x) {
  if constexpr (kind == GatedKind::GeGlu) {
    const Gelu<A> g = Gelu<A>::at(x);
    return {x * g.logistic, g.logistic + g.slope * (g.logistic * g.complement)};
  } else {
    // s = 1 / (1 + e^(-x)); y = x s; dy/dx = s + x s (1 - s). Beyond the clamp s is below 1e-34 or
    // equal to 1.
    constexpr A kClamp = A(80);
    const A above = x < -kClamp ? -kClamp : x;
    const A bounded = above > kClamp ? kClamp : above;
    const A power = exp(-bounded);
    const A s = A(1) / (A(1) + power);
    return {above * s, s + bounded * (s * (power * s))};
  }
}

template <GatedKind kind, typename T>
void gated_row(const T* gate, const T* up, T* y, std::int64_t width) {
  using A = Accumulator<T>;
#pragma omp simd
  for (std::int64_t c = 0; c < width; ++c)
    store(y + c, activate<kind, A>(load(gate + c)).value * load(up + c));
}

template <GatedKind kind, typename T>
void forward(Context& context, const GatedForward& args) {
  const auto* gate = static_cast<const T*>(args.gate.data);
  const auto* up = static_cast<const T*>(args.up.data);
  auto* y = static_cast<T*>(args.y.data);
  const std::int64_t width = args.gate.shape[1];
  const std::int64_t gate_stride = args.gate.strides[0], up_stride = args.up.strides[0];
  const std::int64_t y_stride = args.y.strides[0];
  for_rows(context, args.gate.shape[0], width, [=](std::int64_t row, std::int64_t end) {
    for (; row < end; ++row)
      gated_row<kind>(gate + row * gate_stride, up + row * up_stride, y + row * y_stride, width);
  });
}

/// to = values, or += if accumulate.
template <typename T>
void put(const Accumulator<T>* values, T* to, bool accumulate, std::int64_t width) {
  if (accumulate) {
#pragma omp simd
    for (std::int64_t c = 0; c < width; ++c) store(to + c, values[c] + load(to + c));
  } else {
#pragma omp simd
    for (std::int64_t c = 0; c < width; ++c) store(to + c, values[c]);
  }
}

/// Gradients of at most kGatedTile elements of a row; either gradient may be null.
constexpr std::int64_t kGatedTile = 256;
template <GatedKind kind, typename T>
void gated_gradients(const T* gate, const T* up, const T* grad_y, T* grad_gate, bool add_to_gate,
                     T* grad_up, bool add_to_up, std::int64_t width) {
  using A = Accumulator<T>;
  A of_gate[kGatedTile], of_up[kGatedTile];
#pragma omp simd
  for (std::int64_t c = 0; c < width; ++c) {
    const Activation<A> at = activate<kind, A>(load(gate + c));
    const A upstream = load(grad_y + c);
    of_gate[c] = upstream * load(up + c) * at.derivative;
    of_up[c] = upstream * at.value;
  }
  if (grad_gate != nullptr) put(of_gate, grad_gate, add_to_gate, width);
  if (grad_up != nullptr) put(of_up, grad_up, add_to_up, width);
}

template <GatedKind kind, typename T>
void backward(Context& context, const GatedBackward& args) {
  const auto* gate = static_cast<const T*>(args.gate.data);
  const auto* up = static_cast<const T*>(args.up.data);
  const auto* grad_y = static_cast<const T*>(args.grad_y.data);
  auto* grad_gate = static_cast<T*>(args.grad_gate.view.data);
  auto* grad_up = static_cast<T*>(args.grad_up.view.data);
  const auto stride = [](const TensorView& view) { return view.defined() ? view.strides[0] : 0; };
  const std::int64_t gate_stride = stride(args.gate), up_stride = stride(args.up);
  const std::int64_t grad_y_stride = stride(args.grad_y);
  const std::int64_t grad_gate_stride = stride(args.grad_gate.view);
  const std::int64_t grad_up_stride = stride(args.grad_up.view);
  const bool add_to_gate = args.grad_gate.accumulate, add_to_up = args.grad_up.accumulate;
  const std::int64_t width = args.gate.shape[1];
  for_rows(context, args.gate.shape[0], width, [=](std::int64_t row, std::int64_t end) {
    const auto at = [](auto* data, std::int64_t offset) {
      return data == nullptr ? data : data + offset;
    };
    for (; row < end; ++row) {
      for (std::int64_t c = 0; c < width; c += kGatedTile)
        gated_gradients<kind>(gate + row * gate_stride + c, up + row * up_stride + c,
                              grad_y + row * grad_y_stride + c,
                              at(grad_gate, row * grad_gate_stride + c), add_to_gate,
                              at(grad_up, row * grad_up_stride + c), add_to_up,
                              std::min(kGatedTile, width - c));
    }
  });
}

/// Calls f(std::integral_constant<GatedKind, kind>, std::type_identity<T>).
template <typename F>
void visit_gated(GatedKind kind, DType dtype, F&& f) {
  using SwiGlu = std::integral_constant<GatedKind, GatedKind::SwiGlu>;
  using GeGlu = std::integral_constant<GatedKind, GatedKind::GeGlu>;
  visit_dtype(dtype,
              [&](auto type) { kind == GatedKind::SwiGlu ? f(SwiGlu{}, type) : f(GeGlu{}, type); });
}

}  // namespace

void gelu_forward(Context& context, const GeluForward& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) { forward<T>(context, args); });
}

void gelu_backward(Context& context, const GeluBackward& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) {
    visit_flag(args.grad_x.accumulate,
               [&](auto accumulate) { backward<T, accumulate()>(context, args); });
  });
}

void gated_forward(Context& context, const GatedForward& args) {
  visit_gated(args.kind, args.gate.dtype, [&]<typename T>(auto kind, std::type_identity<T>) {
    forward<kind(), T>(context, args);
  });
}

void gated_backward(Context& context, const GatedBackward& args) {
  visit_gated(args.kind, args.gate.dtype, [&]<typename T>(auto kind, std::type_identity<T>) {
    backward<kind(), T>(context, args);
  });
}

TESSERA_CPU_END
