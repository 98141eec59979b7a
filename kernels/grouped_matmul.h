#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

// Products of groups of rows, each with a matrix of its own. The sizes of groups are known to the
// device alone; neither the work that is queued nor its scratch memory depends on them.
namespace tessera::kernels {

inline constexpr std::int64_t kMostGroups = 256;

/// c[r] = a[r] op(b[i]) (+= if it accumulates) for the rows r of each group first + i, i < groups.
/// Other rows of c stay unchanged.
///
/// a        [M, K], f64, f32 or bf16, contiguous
/// offsets  [all groups + 1] i32, ascending, from 0 to M: first row of each group, and M
/// b        `groups` matrices [K, N], or [N, K] if transpose_b, dtype of a, contiguous
/// c        [M, N], dtype of a, contiguous
struct GroupedMatmul {
  TensorView a, offsets;
  const TensorView* b = nullptr;
  std::int64_t first = 0, groups = 0;  ///< at most kMostGroups of them
  GradientView c;
  bool transpose_b = false;
};
void grouped_matmul(Context& context, const GroupedMatmul& args);

/// c[i] = transposed rows of a times rows of b (+= if it accumulates), over the rows of group first + i:
/// zero for an empty group.
///
/// a        [M, P], f64, f32 or bf16, contiguous
/// b        [M, Q], dtype of a, contiguous
/// offsets  as in GroupedMatmul
/// c        `groups` matrices [P, Q], accumulator dtype of a, contiguous, or undefined
struct GroupedGradient {
  TensorView a, b, offsets;
  const GradientView* c = nullptr;
  std::int64_t first = 0, groups = 0;  ///< at most kMostGroups of them
};
void grouped_gradient(Context& context, const GroupedGradient& args);

}  // namespace tessera::kernels
