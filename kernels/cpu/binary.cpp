#include "kernels/binary.h"

#include "kernels/cpu/strided.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

template <BinaryKind kind, typename A>
inline A apply(A a, A b) {
  if constexpr (kind == BinaryKind::Add) {
    return a + b;
  } else if constexpr (kind == BinaryKind::Subtract) {
    return a - b;
  } else if constexpr (kind == BinaryKind::Multiply) {
    return a * b;
  } else if constexpr (kind == BinaryKind::Divide) {
    return a / b;
  } else if constexpr (kind == BinaryKind::ReluGradient) {
    return a > A(0) ? b : A(0);
  } else if constexpr (kind == BinaryKind::SigmoidGradient) {
    return a * (A(1) - a) * b;
  } else if constexpr (kind == BinaryKind::SiluGradient) {
    // s + a s (1 - s) with s = 1 / (1 + e^(-a)); beyond the clamp, s is below 1e-34 or equal to 1.
    const A above = a < A(-80) ? A(-80) : a;
    const A bounded = above > A(80) ? A(80) : above;
    const A power = exp(-bounded);
    const A s = A(1) / (A(1) + power);
    return b * (s + bounded * (s * (power * s)));
  } else if constexpr (kind == BinaryKind::TanhGradient) {
    return (A(1) - a * a) * b;
  } else {
    return b / (a * a);
  }
}

template <BinaryKind kind, bool kAccumulate, typename T>
void run_piece(const T* a, std::int64_t a_stride, const T* b, std::int64_t b_stride, T* y,
               std::int64_t y_stride, std::int64_t count, Accumulator<T> scale) {
  const auto element = [=](Accumulator<T> left, Accumulator<T> right, T* to) {
    auto value = scale * apply<kind>(left, right);
    if constexpr (kAccumulate) value += load(to);
    store(to, value);
  };
  if (y_stride == 1 && a_stride == 1 && b_stride == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) element(load(a + i), load(b + i), y + i);
  } else if (y_stride == 1 && a_stride == 1 && b_stride == 0) {
    const auto right = load(b);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) element(load(a + i), right, y + i);
  } else {
    for (std::int64_t i = 0; i < count; ++i)
      element(load(a + i * a_stride), load(b + i * b_stride), y + i * y_stride);
  }
}

template <BinaryKind kind, bool kAccumulate, typename T>
void run(Context& context, const Binary& args) {
  const auto* a = static_cast<const T*>(args.a.data);
  const auto* b = static_cast<const T*>(args.b.data);
  auto* y = static_cast<T*>(args.y.view.data);
  const auto scale = static_cast<Accumulator<T>>(args.scale);
  const StridedLoop loop = strided_loop({&args.a, &args.b, &args.y.view});
  for_pieces<3>(context, loop, 1, [=, &loop](const std::int64_t* offsets, std::int64_t count) {
    run_piece<kind, kAccumulate>(a + offsets[0], loop.stride(0), b + offsets[1], loop.stride(1),
                                 y + offsets[2], loop.stride(2), count, scale);
  });
}

template <BinaryKind kind>
void run(Context& context, const Binary& args) {
  visit_dtype(args.a.dtype, [&]<typename T>(std::type_identity<T>) {
    visit_flag(args.y.accumulate,
               [&](auto accumulate) { run<kind, accumulate(), T>(context, args); });
  });
}

}  // namespace

void binary(Context& context, const Binary& args) {
  switch (args.kind) {
    case BinaryKind::Add:
      return run<BinaryKind::Add>(context, args);
    case BinaryKind::Subtract:
      return run<BinaryKind::Subtract>(context, args);
    case BinaryKind::Multiply:
      return run<BinaryKind::Multiply>(context, args);
    case BinaryKind::Divide:
      return run<BinaryKind::Divide>(context, args);
    case BinaryKind::ReluGradient:
      return run<BinaryKind::ReluGradient>(context, args);
    case BinaryKind::SigmoidGradient:
      return run<BinaryKind::SigmoidGradient>(context, args);
    case BinaryKind::SiluGradient:
      return run<BinaryKind::SiluGradient>(context, args);
    case BinaryKind::TanhGradient:
      return run<BinaryKind::TanhGradient>(context, args);
    case BinaryKind::ReciprocalGradient:
      return run<BinaryKind::ReciprocalGradient>(context, args);
  }
}

TESSERA_CPU_END
