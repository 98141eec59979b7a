#include "kernels/selection.h"

#include "kernels/cpu/strided.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

/// visit_dtype() with i32.
template <typename F>
void visit_selected(DType dtype, F&& f) {
  if (dtype == DType::I32)
    f(std::type_identity<std::int32_t>{});
  else
    visit_dtype(dtype, f);
}

/// An operand: a view, or one value that stands for all elements.
template <typename T>
struct Operand {
  TensorView view;
  T value;

  Operand(const TensorView& from, double number, const Shape& shape) : view(from) {
    if constexpr (std::is_same_v<T, std::int32_t>)
      value = static_cast<T>(number);
    else
      store(&value, static_cast<Accumulator<T>>(number));
    if (from.data != nullptr) return;
    view = {&value, DType::F32, shape, shape, {}};
    for (int d = 0; d < shape.size(); ++d) view.strides[d] = 0;
  }
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;
  const T* data() const { return static_cast<const T*>(view.data); }
};

template <typename T>
void run(Context& context, const Where& args) {
  const Operand<T> left(args.a, args.a_value, args.condition.shape);
  const Operand<T> right(args.b, args.b_value, args.condition.shape);
  const auto* condition = static_cast<const std::int32_t*>(args.condition.data);
  const T* const a = left.data();
  const T* const b = right.data();
  auto* y = static_cast<T*>(args.y.view.data);
  const StridedLoop loop = strided_loop({&args.condition, &left.view, &right.view, &args.y.view});
  const std::int64_t by[] = {loop.stride(0), loop.stride(1), loop.stride(2), loop.stride(3)};
  const auto piece = [&](const std::int64_t* offsets, std::int64_t count) {
    const std::int32_t* const c = condition + offsets[0];
    const T* const p = a + offsets[1];
    const T* const q = b + offsets[2];
    T* const to = y + offsets[3];
    if constexpr (!std::is_same_v<T, std::int32_t>) {
      if (args.y.accumulate) {
        for (std::int64_t i = 0; i < count; ++i)
          store(to + i * by[3],
                load(to + i * by[3]) + load(c[i * by[0]] != 0 ? p + i * by[1] : q + i * by[2]));
        return;
      }
    }
    for (std::int64_t i = 0; i < count; ++i)
      to[i * by[3]] = c[i * by[0]] != 0 ? p[i * by[1]] : q[i * by[2]];
  };
  for_pieces<4>(context, loop, 1, piece);
}

template <CompareKind kind, typename A>
inline bool holds(A a, A b) {
  if constexpr (kind == CompareKind::Equal) return a == b;
  if constexpr (kind == CompareKind::NotEqual) return a != b;
  if constexpr (kind == CompareKind::Less) return a < b;
  return a <= b;
}

template <typename T>
inline auto compared(const T* p) {
  if constexpr (std::is_same_v<T, std::int32_t>)
    return *p;
  else
    return load(p);
}

template <CompareKind kind, typename T>
void run(Context& context, const Compare& args) {
  const Operand<T> other(args.b, args.b_value, args.y.shape);
  const TensorView& first = args.swapped ? other.view : args.a;
  const TensorView& second = args.swapped ? args.a : other.view;
  const auto* a = static_cast<const T*>(first.data);
  const auto* b = static_cast<const T*>(second.data);
  auto* y = static_cast<std::int32_t*>(args.y.data);
  const StridedLoop loop = strided_loop({&first, &second, &args.y});
  for_pieces<3>(context, loop, 1, [=, &loop](const std::int64_t* offsets, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i)
      y[offsets[2] + i * loop.stride(2)] =
          holds<kind>(compared(a + offsets[0] + i * loop.stride(0)),
                      compared(b + offsets[1] + i * loop.stride(1)))
              ? 1
              : 0;
  });
}

template <CompareKind kind>
void run(Context& context, const Compare& args) {
  visit_selected(args.a.dtype,
                 [&]<typename T>(std::type_identity<T>) { run<kind, T>(context, args); });
}

}  // namespace

void where(Context& context, const Where& args) {
  visit_selected(args.y.view.dtype,
                 [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

void compare(Context& context, const Compare& args) {
  switch (args.kind) {
    case CompareKind::Equal:
      return run<CompareKind::Equal>(context, args);
    case CompareKind::NotEqual:
      return run<CompareKind::NotEqual>(context, args);
    case CompareKind::Less:
      return run<CompareKind::Less>(context, args);
    case CompareKind::LessEqual:
      return run<CompareKind::LessEqual>(context, args);
  }
}

TESSERA_CPU_END
