#include "kernels/activation.h"

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

// The tanh form written with the logistic function s = 1 / (1 + e^(-2u)), u = kAlpha (x + kBeta
// x^3): 1 + tanh(u) = 2 s, hence y = x s and dy/dx = s + 2 x u' s (1 - s). It keeps its relative
// accuracy where 1 + tanh(u) cancels.
template <typename A>
struct Gelu {
  static constexpr A kAlpha = A(0.7978845608028654);  // sqrt(2 / pi)
  static constexpr A kBeta = A(0.044715);
  // Beyond it s is below 1e-33 or equal to 1; clamping there keeps e^(-2u) and x^3 finite.
  static constexpr A kClamp = A(9.5);

  A logistic;    ///< s
  A complement;  ///< 1 - s, without cancellation
  A slope;       ///< 2 x u'

  static inline Gelu at(A x) {
    A bounded = x < -kClamp ? -kClamp : x;
    bounded = bounded > kClamp ? kClamp : bounded;
    const A square = bounded * bounded;
    const A u = kAlpha * bounded * (A(1) + kBeta * square);
    const A power = exp(A(-2) * u);
    const A s = A(1) / (A(1) + power);
    return {s, power * s, A(2) * kAlpha * bounded * (A(1) + A(3) * kBeta * square)};
  }
};

template <typename T>
void forward(Context& context, const GeluForward& args) {
  using A = Accumulator<T>;
  const auto* x = static_cast<const T*>(args.x.data);
  auto* y = static_cast<T*>(args.y.data);
  for_elements(context, args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const A value = load(x + i);
      store(y + i, value * Gelu<A>::at(value).logistic);
    }
  });
}

template <typename T, bool kAccumulate>
void backward(Context& context, const GeluBackward& args) {
  using A = Accumulator<T>;
  const auto* x = static_cast<const T*>(args.x.data);
  const auto* grad_y = static_cast<const T*>(args.grad_y.data);
  auto* grad_x = static_cast<T*>(args.grad_x.view.data);
  for_elements(context, args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const A value = load(x + i);
      const Gelu<A> g = Gelu<A>::at(value);
      const A derivative = g.logistic + g.slope * (g.logistic * g.complement);
      A grad = load(grad_y + i) * derivative;
      if constexpr (kAccumulate) grad += load(grad_x + i);
      store(grad_x + i, grad);
    }
  });
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

TESSERA_CPU_END
