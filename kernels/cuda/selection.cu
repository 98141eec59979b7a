// Elementwise choice and comparison: a thread owns an element. Memory-bound.

#include "kernels/cuda/strided.h"
#include "kernels/selection.h"

namespace tessera::kernels::cuda {
namespace {

/// visit_floating() with i32.
template <typename F>
void visit_selected(DType dtype, const char* name, const F& f) {
  if (dtype == DType::I32)
    f(std::type_identity<std::int32_t>{});
  else
    visit_floating(dtype, name, f);
}

__device__ __forceinline__ std::int32_t widen_any(std::int32_t x) { return x; }
template <typename T>
__device__ __forceinline__ Compute<T> widen_any(T x) {
  return widen(x);
}

/// A number as an element.
template <typename T>
T element(double number) {
  return T(static_cast<Compute<T>>(number));
}
template <>
std::int32_t element<std::int32_t>(double number) {
  return static_cast<std::int32_t>(number);
}

/// The view, or one that repeats anything if it is undefined: its elements are not read.
TensorView or_repeated(const TensorView& view, const TensorView& like) {
  if (view.data != nullptr) return view;
  TensorView repeated = like;
  for (int d = 0; d < repeated.shape.size(); ++d) repeated.strides[d] = 0;
  return repeated;
}

template <typename T>
struct WhereBody {
  const std::int32_t* condition;
  const T* a;  // null: a_value
  const T* b;
  T* y;
  StridedLoop loop;
  T a_value, b_value;
  bool accumulate;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    T value;
    if (condition[offset_of(loop, 0, i)] != 0)
      value = a != nullptr ? a[offset_of(loop, 1, i)] : a_value;
    else
      value = b != nullptr ? b[offset_of(loop, 2, i)] : b_value;
    T* const to = y + offset_of(loop, 3, i);
    if constexpr (!std::is_same_v<T, std::int32_t>) {
      if (accumulate) value = narrow<T>(widen(value) + widen(*to));
    }
    *to = value;
  }
};

template <typename A>
__device__ __forceinline__ bool holds(CompareKind kind, A a, A b) {
  switch (kind) {
    case CompareKind::Equal:
      return a == b;
    case CompareKind::NotEqual:
      return a != b;
    case CompareKind::Less:
      return a < b;
    case CompareKind::LessEqual:
      return a <= b;
  }
  return false;
}

template <typename T>
struct CompareBody {
  const T* a;
  const T* b;  // null: b_value
  std::int32_t* y;
  StridedLoop loop;
  T b_value;
  CompareKind kind;
  bool swapped;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const auto left = widen_any(a[offset_of(loop, 0, i)]);
    const auto right = widen_any(b != nullptr ? b[offset_of(loop, 1, i)] : b_value);
    const bool result = swapped ? holds(kind, right, left) : holds(kind, left, right);
    y[offset_of(loop, 2, i)] = result ? 1 : 0;
  }
};

}  // namespace

void where(Context& context, const Where& args) {
  const TensorView a = or_repeated(args.a, args.condition);
  const TensorView b = or_repeated(args.b, args.condition);
  visit_selected(args.y.view.dtype, "where", [&]<typename T>(std::type_identity<T>) {
    const WhereBody<T> body{static_cast<const std::int32_t*>(args.condition.data),
                            static_cast<const T*>(args.a.data),
                            static_cast<const T*>(args.b.data),
                            static_cast<T*>(args.y.view.data),
                            strided_loop({&args.condition, &a, &b, &args.y.view}),
                            element<T>(args.a_value),
                            element<T>(args.b_value),
                            args.y.accumulate};
    launch_elementwise<1>(context, "where", body.loop.count(), false, body);
  });
}

void compare(Context& context, const Compare& args) {
  const TensorView b = or_repeated(args.b, args.a);
  visit_selected(args.a.dtype, "compare", [&]<typename T>(std::type_identity<T>) {
    const CompareBody<T> body{static_cast<const T*>(args.a.data),
                              static_cast<const T*>(args.b.data),
                              static_cast<std::int32_t*>(args.y.data),
                              strided_loop({&args.a, &b, &args.y}),
                              element<T>(args.b_value),
                              args.kind,
                              args.swapped};
    launch_elementwise<1>(context, "compare", body.loop.count(), false, body);
  });
}

TESSERA_CUDA_KERNEL(where, Where)
TESSERA_CUDA_KERNEL(compare, Compare)

}  // namespace tessera::kernels::cuda
