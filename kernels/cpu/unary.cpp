#include "kernels/unary.h"

#include "kernels/cpu/strided.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

/// e^x over the whole range: exp() saturates, and the square of exp(x / 2) reaches 0 and infinity.
inline float exp_unbounded(float x) {
  const float root = exp(0.5F * x);
  const bool safe = x > -87.0F && x < 87.0F;
  return safe ? exp(x) : root * root;
}
inline double exp_unbounded(double x) { return std::exp(x); }

template <UnaryKind kind, typename A>
inline A apply(A x, A scalar) {
  if constexpr (kind == UnaryKind::Copy) {
    return x;
  } else if constexpr (kind == UnaryKind::Multiply) {
    return x * scalar;
  } else if constexpr (kind == UnaryKind::Divide) {
    return x / scalar;
  } else if constexpr (kind == UnaryKind::Add) {
    return x + scalar;
  } else if constexpr (kind == UnaryKind::SubtractFrom) {
    return scalar - x;
  } else if constexpr (kind == UnaryKind::DivideInto) {
    return scalar / x;
  } else if constexpr (kind == UnaryKind::Relu) {
    return x < A(0) ? A(0) : x;  // NaN stays
  } else if constexpr (kind == UnaryKind::Sigmoid) {
    return A(1) / (A(1) + exp(-x));
  } else if constexpr (kind == UnaryKind::Silu) {
    const A above = x < A(-80) ? A(-80) : x;  // beyond, the result is below 1e-32
    return above / (A(1) + exp(-above));
  } else if constexpr (kind == UnaryKind::Tanh) {
    return std::tanh(x);
  } else if constexpr (kind == UnaryKind::Exp) {
    return exp_unbounded(x);
  } else if constexpr (kind == UnaryKind::Log) {
    return std::log(x);
  } else {
    return std::sqrt(x);
  }
}

template <UnaryKind kind, bool kAccumulate, typename T>
void run_piece(const T* x, std::int64_t x_stride, T* y, std::int64_t y_stride, std::int64_t count,
               Accumulator<T> scalar) {
  const auto element = [=](const T* from, T* to) {
    auto value = apply<kind>(load(from), scalar);
    if constexpr (kAccumulate) value += load(to);
    store(to, value);
  };
  if (x_stride == 1 && y_stride == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) element(x + i, y + i);
  } else {
    for (std::int64_t i = 0; i < count; ++i) element(x + i * x_stride, y + i * y_stride);
  }
}

template <UnaryKind kind, bool kAccumulate, typename T>
void run(Context& context, const Unary& args) {
  const auto* x = static_cast<const T*>(args.x.data);
  auto* y = static_cast<T*>(args.y.view.data);
  const auto scalar = static_cast<Accumulator<T>>(args.scalar);
  const StridedLoop loop = strided_loop({&args.x, &args.y.view});
  for_pieces<2>(context, loop, 1, [=, &loop](const std::int64_t* offsets, std::int64_t count) {
    run_piece<kind, kAccumulate>(x + offsets[0], loop.stride(0), y + offsets[1], loop.stride(1),
                                 count, scalar);
  });
}

template <UnaryKind kind>
void run(Context& context, const Unary& args) {
  constexpr bool kMayAccumulate =
      kind == UnaryKind::Copy || kind == UnaryKind::Multiply || kind == UnaryKind::Divide;
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (kMayAccumulate) {
      if (args.y.accumulate) return run<kind, true, T>(context, args);
    }
    run<kind, false, T>(context, args);
  });
}

}  // namespace

void unary(Context& context, const Unary& args) {
  switch (args.kind) {
    case UnaryKind::Copy:
      return run<UnaryKind::Copy>(context, args);
    case UnaryKind::Multiply:
      return run<UnaryKind::Multiply>(context, args);
    case UnaryKind::Divide:
      return run<UnaryKind::Divide>(context, args);
    case UnaryKind::Add:
      return run<UnaryKind::Add>(context, args);
    case UnaryKind::SubtractFrom:
      return run<UnaryKind::SubtractFrom>(context, args);
    case UnaryKind::DivideInto:
      return run<UnaryKind::DivideInto>(context, args);
    case UnaryKind::Relu:
      return run<UnaryKind::Relu>(context, args);
    case UnaryKind::Sigmoid:
      return run<UnaryKind::Sigmoid>(context, args);
    case UnaryKind::Silu:
      return run<UnaryKind::Silu>(context, args);
    case UnaryKind::Tanh:
      return run<UnaryKind::Tanh>(context, args);
    case UnaryKind::Exp:
      return run<UnaryKind::Exp>(context, args);
    case UnaryKind::Log:
      return run<UnaryKind::Log>(context, args);
    case UnaryKind::Sqrt:
      return run<UnaryKind::Sqrt>(context, args);
  }
}

TESSERA_CPU_END
