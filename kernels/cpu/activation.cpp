#include "kernels/activation.h"

#include <limits>

#include "kernels/cpu/gelu.h"
#include "kernels/cpu/loops.h"
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

template <typename V>
struct Activation {
  V value, derivative;
};

/// @tparam V  a vector of the accumulator, or one accumulator
template <GatedKind kind, typename V>
inline Activation<V> activate(V x) {
  using A = Element<V>;
  if constexpr (kind == GatedKind::GeGlu) {
    const Gelu<V> g = Gelu<V>::at(x);
    return {x * g.logistic, g.logistic + g.slope * (g.logistic * g.complement)};
  } else {
    // s = 1 / (1 + e^(-x)); y = x s; dy/dx = s + x s (1 - s). Beyond the clamp s is below 1e-34 or
    // equal to 1.
    constexpr A kClamp = A(80);
    const V above = clamp(x, -kClamp, std::numeric_limits<A>::infinity());
    const V bounded = clamp(x, -kClamp, kClamp);
    const V power = exp_in_range(-bounded);
    const V s = A(1) / (A(1) + power);
    return {above * s, s + bounded * (s * (power * s))};
  }
}

template <GatedKind kind, typename T>
void gated_row(const T* gate, const T* up, T* y, std::int64_t width) {
  for_vectors<Accumulator<T>>(width, [=]<typename V>(std::type_identity<V>, std::int64_t c) {
    store_as(y + c, activate<kind, V>(load_as<V>(gate + c)).value * load_as<V>(up + c));
  });
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

/// A row's gradients, added to what is there if so told; either may be null.
template <GatedKind kind, typename T>
void gated_gradients(const T* gate, const T* up, const T* grad_y, T* grad_gate, bool add_to_gate,
                     T* grad_up, bool add_to_up, std::int64_t width) {
  for_vectors<Accumulator<T>>(width, [=]<typename V>(std::type_identity<V>, std::int64_t c) {
    const auto put = [](T* to, V value, bool add) {
      store_as(to, add ? value + load_as<V>(to) : value);
    };
    const Activation<V> at = activate<kind, V>(load_as<V>(gate + c));
    const V upstream = load_as<V>(grad_y + c), factor = load_as<V>(up + c);
    if (grad_gate != nullptr) put(grad_gate + c, upstream * factor * at.derivative, add_to_gate);
    if (grad_up != nullptr) put(grad_up + c, upstream * at.value, add_to_up);
  });
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
    for (; row < end; ++row)
      gated_gradients<kind>(gate + row * gate_stride, up + row * up_stride,
                            grad_y + row * grad_y_stride, at(grad_gate, row * grad_gate_stride),
                            add_to_gate, at(grad_up, row * grad_up_stride), add_to_up, width);
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
