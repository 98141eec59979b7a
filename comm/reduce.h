#pragma once

#include <cstdint>
#include <span>

#include "comm/communicator.h"
#include "core/base/dtype.h"

namespace tessera::comm {

/// out[i] = parts[0][i] + parts[1][i] + ..., in this order, in float32, so that every rank gets the
/// same bits. `out` may be one of the parts if they are f32.
///
/// @param dtype  dtype of the parts: f32 or bf16
void sum_parts_f32(std::span<const void* const> parts, DType dtype, float* out, std::int64_t count);

/// Sum or maximum for all_reduce, in the dtype of the parts: f64, f32 or i64. Max propagates NaN.
/// `out` may be one of the parts.
void reduce_parts(std::span<const void* const> parts, DType dtype, ReduceOp op, void* out,
                  std::int64_t count);

}  // namespace tessera::comm
