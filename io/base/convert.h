#pragma once

#include <cstdint>

#include "core/base/dtype.h"

namespace tessera::io {

/// Whether convert_elements can turn `from` into `to`: equal dtypes, or from f64, f32, bf16 or f16
/// to f32, bf16 or f16.
bool can_convert(DType from, DType to);

/// Converts n elements from `source` to `out`. Narrowing rounds once, to nearest, ties to
/// even, which may give infinity; NaN stays NaN. The memory may be unaligned; the two must not overlap.
/// @throws Unsupported unless can_convert(from, to)
void convert_elements(DType from, const void* source, DType to, void* out, std::int64_t n);

}  // namespace tessera::io
