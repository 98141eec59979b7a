// Elementwise functions of two operands: a thread owns an element. Memory-bound.

#include <cmath>

#include "kernels/binary.h"
#include "kernels/cuda/strided.h"

namespace tessera::kernels::cuda {
namespace {

template <typename A>
__device__ __forceinline__ A apply(BinaryKind kind, A a, A b) {
  switch (kind) {
    case BinaryKind::Add:
      return a + b;
    case BinaryKind::Subtract:
      return a - b;
    case BinaryKind::Multiply:
      return a * b;
    case BinaryKind::Divide:
      return a / b;
    case BinaryKind::ReluGradient:
      return a > A(0) ? b : A(0);
    case BinaryKind::SigmoidGradient:
      return a * (A(1) - a) * b;
    case BinaryKind::SiluGradient: {
      // As in kernels/cpu/binary.cpp.
      const A above = a < A(-80) ? A(-80) : a;
      const A bounded = above > A(80) ? A(80) : above;
      const A power = std::exp(-bounded);
      const A s = A(1) / (A(1) + power);
      return b * (s + bounded * (s * (power * s)));
    }
    case BinaryKind::TanhGradient:
      return (A(1) - a * a) * b;
    case BinaryKind::ReciprocalGradient:
      return b / (a * a);
  }
  return a;
}

template <typename T>
struct BinaryBody {
  const T* a;
  const T* b;
  T* y;
  StridedLoop loop;
  BinaryKind kind;
  bool accumulate;
  Compute<T> scale;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    T* const to = y + offset_of(loop, 2, i);
    Compute<T> value =
        scale * apply(kind, widen(a[offset_of(loop, 0, i)]), widen(b[offset_of(loop, 1, i)]));
    if (accumulate) value += widen(*to);
    *to = narrow<T>(value);
  }
};

}  // namespace

void binary(Context& context, const Binary& args) {
  visit_floating(args.a.dtype, "binary", [&]<typename T>(std::type_identity<T>) {
    const BinaryBody<T> body{static_cast<const T*>(args.a.data),
                             static_cast<const T*>(args.b.data),
                             static_cast<T*>(args.y.view.data),
                             strided_loop({&args.a, &args.b, &args.y.view}),
                             args.kind,
                             args.y.accumulate,
                             static_cast<Compute<T>>(args.scale)};
    launch_elementwise<1>(context, "binary", body.loop.count(), false, body);
  });
}

TESSERA_CUDA_KERNEL(binary, Binary)

}  // namespace tessera::kernels::cuda
