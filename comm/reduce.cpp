#include "comm/reduce.h"

#include <algorithm>
#include <type_traits>

namespace tessera::comm {
namespace {

// Elements per block. The accumulator fits the L1 cache, and the loops vectorize because it can't
// alias the parts.
constexpr std::int64_t kBlock = 1024;

template <typename In, typename Out, typename Combine>
void reduce(std::span<const void* const> parts, Out* out, std::int64_t count, Combine combine) {
  alignas(64) Out sums[kBlock];
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, count - begin);
    const In* first = static_cast<const In*>(parts[0]) + begin;
    for (std::int64_t i = 0; i < n; ++i) sums[i] = static_cast<Out>(first[i]);
    for (const void* part : parts.subspan(1)) {
      const In* next = static_cast<const In*>(part) + begin;
      for (std::int64_t i = 0; i < n; ++i) sums[i] = combine(sums[i], static_cast<Out>(next[i]));
    }
    std::copy_n(sums, n, out + begin);
  }
}

template <typename T>
void reduce_same(std::span<const void* const> parts, ReduceOp op, void* out, std::int64_t count) {
  if (op == ReduceOp::Sum) {
    reduce<T>(parts, static_cast<T*>(out), count, [](T a, T b) { return a + b; });
  } else {
    // Not std::max, because a NaN of either operand must propagate.
    reduce<T>(parts, static_cast<T*>(out), count, [](T a, T b) { return b > a || b != b ? b : a; });
  }
}

}  // namespace

void sum_parts_f32(std::span<const void* const> parts, DType dtype, float* out,
                   std::int64_t count) {
  const auto add = [](float a, float b) { return a + b; };
  if (dtype == DType::F32) {
    reduce<float>(parts, out, count, add);
  } else {
    require<InternalError>(dtype == DType::BF16, "sum of parts of dtype {}", dtype);
    reduce<BFloat16>(parts, out, count, add);
  }
}

void reduce_parts(std::span<const void* const> parts, DType dtype, ReduceOp op, void* out,
                  std::int64_t count) {
  switch (dtype) {
    case DType::F64:
      return reduce_same<double>(parts, op, out, count);
    case DType::F32:
      return reduce_same<float>(parts, op, out, count);
    case DType::I64:
      return reduce_same<std::int64_t>(parts, op, out, count);
    default:
      throw InternalError("reduction of parts of dtype {}", dtype);
  }
}

}  // namespace tessera::comm
