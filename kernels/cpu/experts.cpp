#include "kernels/experts.h"

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

using Index = std::int64_t;

const std::int32_t* integers(const TensorView& view) {
  return static_cast<const std::int32_t*>(view.data);
}

/// Whether a comes before b in descending order.
template <typename A>
bool is_before(A a, A b) {
  return a > b || (a != a && b == b);
}

template <typename T>
void run(Context& context, const TopK& args) {
  const auto* const x = static_cast<const T*>(args.x.data);
  auto* const index = static_cast<std::int32_t*>(args.index.data);
  const Index width = args.x.shape[1], count = args.index.shape[1];
  for_rows(context, args.x.shape[0], width * count, [=](Index row, Index end) {
    for (; row < end; ++row) {
      const T* const from = x + row * width;
      std::int32_t* const to = index + row * count;
      // Insertion into the sorted list of the largest elements so far.
      for (Index i = 0; i < width; ++i) {
        Index at = std::min(i, count);
        while (at > 0 && is_before(load(from + i), load(from + to[at - 1]))) {
          if (at < count) to[at] = to[at - 1];
          --at;
        }
        if (at < count) to[at] = static_cast<std::int32_t>(i);
      }
    }
  });
}

template <typename T>
void run(Context& /*context*/, const GroupPairs& args) {
  const std::int32_t* const experts = integers(args.experts);
  auto* const order = static_cast<std::int32_t*>(args.order.data);
  auto* const place = static_cast<std::int32_t*>(args.place.data);
  auto* const offsets = static_cast<std::int32_t*>(args.offsets.data);
  auto* const counts = static_cast<T*>(args.counts.data);
  const Index pairs = args.experts.numel(), groups = args.counts.shape[0];
  for (Index e = 0; e <= groups; ++e) offsets[e] = 0;
  for (Index i = 0; i < pairs; ++i) ++offsets[experts[i] + 1];
  for (Index e = 0; e < groups; ++e) {
    counts[e] = static_cast<T>(offsets[e + 1]);
    offsets[e + 1] += offsets[e];
  }
  // offsets[e] moves to the end of group e, then back.
  for (Index i = 0; i < pairs; ++i) {
    const std::int32_t row = offsets[experts[i]]++;
    order[row] = static_cast<std::int32_t>(i);
    place[i] = row;
  }
  for (Index e = groups; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

template <typename T>
void run(Context& context, const SpreadRows& args) {
  const auto* const x = static_cast<const T*>(args.x.data);
  const auto* const weights = static_cast<const Accumulator<T>*>(args.weights.data);
  const std::int32_t* const order = integers(args.order);
  auto* const y = static_cast<T*>(args.y.view.data);
  const Index width = args.y.view.shape[1], rows = args.y.view.shape[0];
  const Index each = rows / args.x.shape[0];
  visit_flag(args.y.accumulate, [&](auto accumulate) {
    for_rows(context, rows, width, [=](Index row, Index end) {
      for (; row < end; ++row) {
        const T* const from = x + order[row] / each * width;
        const Accumulator<T> weight = weights == nullptr ? 1 : weights[order[row]];
        T* const to = y + row * width;
#pragma omp simd
        for (Index c = 0; c < width; ++c) {
          Accumulator<T> value = weight * load(from + c);
          if constexpr (accumulate()) value += load(to + c);
          store(to + c, value);
        }
      }
    });
  });
}

template <typename T>
void run(Context& context, const CollectRows& args) {
  const auto* const x = static_cast<const T*>(args.x.data);
  const auto* const weights = static_cast<const Accumulator<T>*>(args.weights.data);
  const std::int32_t* const place = integers(args.place);
  auto* const y = static_cast<T*>(args.y.view.data);
  const Index width = args.y.view.shape[1], tokens = args.y.view.shape[0];
  const Index each = args.x.shape[0] / tokens;
  const bool accumulate = args.y.accumulate;
  for_rows(context, tokens, width * each, [=](Index token, Index end) {
    constexpr Index kPart = 256;  // columns whose sums are kept in registers or the first cache
    Accumulator<T> sums[kPart];
    for (; token < end; ++token) {
      for (Index begin = 0; begin < width; begin += kPart) {
        const Index count = std::min(kPart, width - begin);
        T* const to = y + token * width + begin;
        for (Index c = 0; c < count; ++c) sums[c] = accumulate ? load(to + c) : 0;
        for (Index pair = token * each; pair < (token + 1) * each; ++pair) {
          const T* const from = x + place[pair] * width + begin;
          const Accumulator<T> weight = weights == nullptr ? 1 : weights[pair];
#pragma omp simd
          for (Index c = 0; c < count; ++c) sums[c] += weight * load(from + c);
        }
#pragma omp simd
        for (Index c = 0; c < count; ++c) store(to + c, sums[c]);
      }
    }
  });
}

template <typename T>
void run(Context& context, const RowProducts& args) {
  const auto* const a = static_cast<const T*>(args.a.data);
  const auto* const b = static_cast<const T*>(args.b.data);
  const std::int32_t* const place = integers(args.place);
  auto* const y = static_cast<Accumulator<T>*>(args.y.view.data);
  const Index width = args.a.shape[1], pairs = args.b.shape[0], each = pairs / args.a.shape[0];
  const bool accumulate = args.y.accumulate;
  for_rows(context, pairs, width, [=](Index pair, Index end) {
    for (; pair < end; ++pair) {
      const T* const left = a + pair / each * width;
      const T* const right = b + place[pair] * width;
      Accumulator<T> sum = 0;
#pragma omp simd reduction(+ : sum)
      for (Index c = 0; c < width; ++c) sum += load(left + c) * load(right + c);
      y[pair] = accumulate ? y[pair] + sum : sum;
    }
  });
}

}  // namespace

void top_k(Context& context, const TopK& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

void group_pairs(Context& context, const GroupPairs& args) {
  if (args.counts.dtype == DType::F64)
    run<double>(context, args);
  else
    run<float>(context, args);
}

void spread_rows(Context& context, const SpreadRows& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

void collect_rows(Context& context, const CollectRows& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

void row_products(Context& context, const RowProducts& args) {
  visit_dtype(args.a.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

TESSERA_CPU_END
