#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/base/context.h"
#include "core/base/thread_pool.h"
#include "kernels/cpu/level.h"

// Loops split over threads.
TESSERA_CPU_BEGIN

/// Below this many elements one thread is faster than waking another.
inline constexpr std::int64_t kSerialElements = 16384;

/// Calls f(std::true_type{}) or f(std::false_type{}), to keep the test of a flag out of a loop.
template <typename F>
void visit_flag(bool flag, F&& f) {
  if (flag) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

/// Calls body(begin, end) on parts of [0, n). Parts start at multiples of kBlock, so the split into
/// vector loop and remainder, and thus every bit, does not depend on the number of threads.
template <typename Body>
void for_elements(Context& context, std::int64_t n, const Body& body) {
  constexpr std::int64_t kBlock = 1024;
  context.threads().parallel_for((n + kBlock - 1) / kBlock, kSerialElements / kBlock,
                                 [&](std::int64_t begin, std::int64_t end) {
                                   body(begin * kBlock, std::min(n, end * kBlock));
                                 });
}

/// Calls body(begin, end) on parts of [0, rows), each row costing about `width` elements.
template <typename Body>
void for_rows(Context& context, std::int64_t rows, std::int64_t width, const Body& body) {
  const std::int64_t grain = kSerialElements / std::max<std::int64_t>(width, 1);
  context.threads().parallel_for(rows, std::max<std::int64_t>(grain, 1), body);
}

TESSERA_CPU_END
