#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

// Routing of tokens to experts. N tokens and k experts for each are M = N k pairs; pair n k + j is
// the j-th expert of token n. Grouped, the pairs of an expert are consecutive rows.
namespace tessera::kernels {

/// Columns of the k largest elements of each row, largest first; equal ones by column. NaN counts as
/// the largest.
///
/// x      [N, E], f64, f32 or bf16, contiguous
/// index  [N, k] i32, contiguous, k <= E
struct TopK {
  TensorView x, index;
};
void top_k(Context& context, const TopK& args);

/// Groups pairs by expert, stably.
///
/// experts  [M] i32, contiguous, each in [0, E)
/// order    [M] i32: the pair of each row
/// place    [M] i32: the row of each pair
/// offsets  [E + 1] i32: first row of each expert, and M
/// counts   [E], f64 or f32: rows of each expert
struct GroupPairs {
  TensorView experts, order, place, offsets, counts;
};
void group_pairs(Context& context, const GroupPairs& args);

/// y[row] = weights[pair] * x[token] (+= if it accumulates), for the pair of each row.
///
/// x        [N, C], f64, f32 or bf16, contiguous
/// order    of GroupPairs
/// weights  [M], accumulator dtype of x, or undefined: 1
/// y        [M, C], dtype of x, contiguous
struct SpreadRows {
  TensorView x, order;
  TensorView weights{};
  GradientView y;
};
void spread_rows(Context& context, const SpreadRows& args);

/// y[token] = sum of weights[pair] * x[row] over the token's pairs in ascending order (+= if it
/// accumulates).
///
/// x        [M, C], f64, f32 or bf16, contiguous
/// place    of GroupPairs
/// weights  [M], accumulator dtype of x, or undefined: 1
/// y        [N, C], dtype of x, contiguous
struct CollectRows {
  TensorView x, place;
  TensorView weights{};
  GradientView y;
};
void collect_rows(Context& context, const CollectRows& args);

/// y[pair] = product of a[token] and b[row] (+= if it accumulates): the gradient of weights.
///
/// a      [N, C], f64, f32 or bf16, contiguous
/// b      [M, C], dtype of a, contiguous
/// place  of GroupPairs
/// y      [M], accumulator dtype of a
struct RowProducts {
  TensorView a, b, place;
  GradientView y;
};
void row_products(Context& context, const RowProducts& args);

}  // namespace tessera::kernels
