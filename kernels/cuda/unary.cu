// Elementwise functions of one operand: a thread owns an element. Memory-bound.

#include <cmath>

#include "kernels/cuda/strided.h"
#include "kernels/unary.h"

namespace tessera::kernels::cuda {
namespace {

template <typename A>
__device__ __forceinline__ A apply(UnaryKind kind, A x, A scalar) {
  switch (kind) {
    case UnaryKind::Copy:
      return x;
    case UnaryKind::Multiply:
      return x * scalar;
    case UnaryKind::Divide:
      return x / scalar;
    case UnaryKind::Add:
      return x + scalar;
    case UnaryKind::SubtractFrom:
      return scalar - x;
    case UnaryKind::DivideInto:
      return scalar / x;
    case UnaryKind::Relu:
      return x < A(0) ? A(0) : x;  // NaN stays
    case UnaryKind::Sigmoid:
      return A(1) / (A(1) + std::exp(-x));
    case UnaryKind::Silu: {
      const A above = x < A(-80) ? A(-80) : x;  // beyond, the result is below 1e-32
      return above / (A(1) + std::exp(-above));
    }
    case UnaryKind::Tanh:
      return std::tanh(x);
    case UnaryKind::Exp:
      return std::exp(x);
    case UnaryKind::Log:
      return std::log(x);
    case UnaryKind::Sqrt:
      return std::sqrt(x);
  }
  return x;
}

template <typename T>
struct UnaryBody {
  const T* x;
  T* y;
  StridedLoop loop;
  UnaryKind kind;
  bool accumulate;
  Compute<T> scalar;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    T* const to = y + offset_of(loop, 1, i);
    Compute<T> value = apply(kind, widen(x[offset_of(loop, 0, i)]), scalar);
    if (accumulate) value += widen(*to);
    *to = narrow<T>(value);
  }
};

}  // namespace

void unary(Context& context, const Unary& args) {
  visit_floating(args.x.dtype, "unary", [&]<typename T>(std::type_identity<T>) {
    const UnaryBody<T> body{static_cast<const T*>(args.x.data),
                            static_cast<T*>(args.y.view.data),
                            strided_loop({&args.x, &args.y.view}),
                            args.kind,
                            args.y.accumulate,
                            static_cast<Compute<T>>(args.scalar)};
    launch_elementwise<1>(context, "unary", body.loop.count(), false, body);
  });
}

TESSERA_CUDA_KERNEL(unary, Unary)

}  // namespace tessera::kernels::cuda
