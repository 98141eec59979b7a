#include "kernels/cpu/column_sums.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"
#include "kernels/elementwise_args.h"

TESSERA_CPU_BEGIN
namespace {

template <typename T>
void run(Context& context, const Add& args) {
  const auto* a = static_cast<const T*>(args.a.data);
  const auto* b = static_cast<const T*>(args.b.data);
  auto* y = static_cast<T*>(args.y.data);
  for_elements(context, args.y.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) store(y + i, load(a + i) + load(b + i));
  });
}

template <typename T>
void run(Context& context, const Fill& args) {
  auto* out = static_cast<T*>(args.out.data);
  T value;
  store(&value, static_cast<Accumulator<T>>(args.value));
  for_elements(context, args.out.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) out[i] = value;
  });
}

template <typename In, typename Out, bool kAccumulate>
void run(Context& context, const Cast& args) {
  // If either side is f64, scales and adds in f64, and rounds once.
  using A = std::conditional_t<std::is_same_v<In, double>, double, Accumulator<Out>>;
  const auto* in = static_cast<const In*>(args.in.data);
  auto* out = static_cast<Out*>(args.out.view.data);
  const auto scale = static_cast<A>(args.scale);
  const auto run = [=](const In* from, Out* to, std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      A value = scale * static_cast<A>(load(from + i));
      if constexpr (kAccumulate) value += static_cast<A>(load(to + i));
      store(to + i, static_cast<Accumulator<Out>>(value));
    }
  };
  if (args.in.is_contiguous() && args.out.view.is_contiguous()) {
    for_elements(context, args.in.numel(),
                 [=](std::int64_t begin, std::int64_t end) { run(in, out, begin, end); });
    return;
  }
  const std::int64_t columns = args.in.shape[1];
  const std::int64_t in_stride = args.in.strides[0], out_stride = args.out.view.strides[0];
  for_rows(context, args.in.shape[0], columns, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      run(in + r * in_stride, out + r * out_stride, 0, columns);
  });
}

template <typename T>
void run(const Total& args) {
  const auto* in = static_cast<const T*>(args.in.data);
  double sum = 0;
  for (std::int64_t i = 0; i < args.in.numel(); ++i) sum += static_cast<double>(load(in + i));
  sum *= args.scale;
  void* const out = args.out.view.data;
  const auto put = [&](auto* to) {
    if (args.out.accumulate) sum += static_cast<double>(*to);
    *to = static_cast<std::remove_reference_t<decltype(*to)>>(sum);
  };
  if (args.out.view.dtype == DType::F64)
    put(static_cast<double*>(out));
  else
    put(static_cast<float*>(out));
}

template <typename T, bool kAccumulate>
void run(Context& context, const SumRows& args) {
  using A = Accumulator<T>;
  const auto* in = static_cast<const T*>(args.in.data);
  auto* out = static_cast<A*>(args.out.view.data);
  const std::int64_t stride = args.in.strides[0];
  column_sums<A, 1>(
      context, args.in.shape[0], args.in.shape[1],
      [=]<typename V>(std::int64_t r, std::int64_t c, V* sums) {
        sums[0] += load_as<V>(in + r * stride + c);
      },
      [=](std::int64_t c, const A* sums) { out[c] = kAccumulate ? out[c] + sums[0] : sums[0]; });
}

}  // namespace

void add(Context& context, const Add& args) {
  visit_dtype(args.y.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

void fill(Context& context, const Fill& args) {
  visit_dtype(args.out.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

void cast(Context& context, const Cast& args) {
  visit_dtype(args.in.dtype, [&]<typename In>(std::type_identity<In>) {
    visit_dtype(args.out.view.dtype, [&]<typename Out>(std::type_identity<Out>) {
      visit_flag(args.out.accumulate,
                 [&](auto accumulate) { run<In, Out, accumulate()>(context, args); });
    });
  });
}

void sum(Context&, const Total& args) {
  visit_dtype(args.in.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(args); });
}

void sum_rows(Context& context, const SumRows& args) {
  visit_dtype(args.in.dtype, [&]<typename T>(std::type_identity<T>) {
    visit_flag(args.out.accumulate, [&](auto accumulate) { run<T, accumulate()>(context, args); });
  });
}

TESSERA_CPU_END
