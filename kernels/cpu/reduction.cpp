#include "kernels/reduction.h"

#include "kernels/cpu/strided.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

constexpr std::int64_t kBlock = 128;  // elements that are added up in f32

template <typename Out>
struct Finish {
  Out* out;
  double scale;
  bool accumulate;

  void operator()(std::int64_t offset, double sum) const {
    double value = scale * sum;
    if (accumulate) value += static_cast<double>(load(out + offset));
    store(out + offset, static_cast<Accumulator<Out>>(value));
  }
};

template <typename T>
double sum_run(const T* x, std::int64_t stride, std::int64_t count) {
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(count, begin + kBlock);
    Accumulator<T> sum = 0;
    if (stride == 1) {
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = begin; i < end; ++i) sum += load(x + i);
    } else {
      for (std::int64_t i = begin; i < end; ++i) sum += load(x + i * stride);
    }
    total += static_cast<double>(sum);
  }
  return total;
}

/// One sum at a time.
template <typename T, typename Out>
void sum_elements(Context& context, const T* in, const StridedLoop& kept, const StridedLoop& summed,
                  const Finish<Out>& finish) {
  const auto sums = [&](const std::int64_t* offsets, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      RowOffsets<1> row(summed, 0);
      double total = 0;
      for (std::int64_t r = 0; r < summed.rows; ++r, row.next())
        total += sum_run(in + offsets[0] + i * kept.stride(0) + row[0], summed.stride(0),
                         summed.width());
      finish(offsets[1] + i * kept.stride(1), total);
    }
  };
  for_pieces<2, 16>(context, kept, summed.count(), sums);
}

/// Sums of adjacent elements side by side.
template <typename T, typename Out>
void sum_columns(Context& context, const T* in, const StridedLoop& kept, const StridedLoop& summed,
                 const Finish<Out>& finish) {
  constexpr int kTile = 64;
  const auto sums = [&](const std::int64_t* offsets, std::int64_t count) {
    double totals[kTile] = {};
    RowOffsets<1> row(summed, 0);
    for (std::int64_t r = 0; r < summed.rows; ++r, row.next()) {
      for (std::int64_t begin = 0; begin < summed.width(); begin += kBlock) {
        Accumulator<T> block[kTile] = {};
        const std::int64_t end = std::min(summed.width(), begin + kBlock);
        for (std::int64_t j = begin; j < end; ++j) {
          const T* const from = in + offsets[0] + row[0] + j * summed.stride(0);
#pragma omp simd
          for (std::int64_t i = 0; i < count; ++i) block[i] += load(from + i);
        }
        for (std::int64_t i = 0; i < count; ++i) totals[i] += static_cast<double>(block[i]);
      }
    }
    for (std::int64_t i = 0; i < count; ++i) finish(offsets[1] + i * kept.stride(1), totals[i]);
  };
  for_pieces<2, kTile>(context, kept, summed.count(), sums);
}

template <typename T, typename Out>
void run(Context& context, const SumTo& args) {
  const SumToLoops loops(args);
  const StridedLoop kept = strided_loop({&loops.kept.in, &loops.kept.out});
  const StridedLoop summed = strided_loop({&loops.summed.in});
  const auto* in = static_cast<const T*>(args.in.data);
  const Finish<Out> finish{static_cast<Out*>(args.out.view.data), args.scale, args.out.accumulate};
  if (kept.stride(0) == 1 && kept.width() > 1)
    sum_columns(context, in, kept, summed, finish);
  else
    sum_elements(context, in, kept, summed, finish);
}

/// @param stride  of the elements along the middle dim
template <typename T>
std::int64_t place_of_max(const T* x, std::int64_t stride, std::int64_t count) {
  std::int64_t best = 0;
  auto highest = load(x);
  for (std::int64_t i = 1; i < count && highest == highest; ++i) {
    const auto value = load(x + i * stride);
    if (value > highest || value != value) {
      highest = value;
      best = i;
    }
  }
  return best;
}

template <typename T>
void run(Context& context, const MaxAlong& args) {
  const std::int64_t outer = args.in.shape[0], count = args.in.shape[1], inner = args.in.shape[2];
  const auto* in = static_cast<const T*>(args.in.data);
  auto* values = static_cast<T*>(args.values.data);
  auto* indices = static_cast<std::int32_t*>(args.indices.data);
  for_rows(context, outer * inner, count, [=](std::int64_t i, std::int64_t end) {
    for (; i < end; ++i) {
      const T* const first = in + i / inner * count * inner + i % inner;
      const std::int64_t place = place_of_max(first, inner, count);
      if (values != nullptr) values[i] = first[place * inner];
      if (indices != nullptr) indices[i] = static_cast<std::int32_t>(place);
    }
  });
}

}  // namespace

void sum_to(Context& context, const SumTo& args) {
  visit_dtype(args.in.dtype, [&]<typename T>(std::type_identity<T>) {
    if (args.out.view.dtype == args.in.dtype)
      run<T, T>(context, args);
    else
      run<T, Accumulator<T>>(context, args);
  });
}

void max_along(Context& context, const MaxAlong& args) {
  visit_dtype(args.in.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

TESSERA_CPU_END
