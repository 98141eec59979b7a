#pragma once

#include <cstdint>
#include <vector>

#include "core/ops/activation.h"
#include "core/tensor.h"

namespace tessera::ops {

// Mixtures of experts. Each of N tokens is routed to k experts, none is dropped: M = N k pairs of a
// token and an expert. Grouped by expert, pairs are rows; memory depends on N and k, never on the
// number of rows of an expert. All sums have a fixed order.

/// Columns of the k largest elements of each row, largest first; equal ones by column.
///
/// @param x  [N, E], f64, f32 or bf16, contiguous
/// @return   [N, k] i32. No gradient; gather() has the elements' values, with one
/// @throws InvalidArgument unless 1 <= k <= E, or on a dtype that does not fit
Tensor top_k(const Tensor& x, std::int64_t k);

/// Places of pairs among rows grouped by expert; pairs of an expert keep their order.
struct Grouping {
  Tensor order;    ///< [M] i32: pair of each row; pair n k + j is the j-th expert of token n
  Tensor place;    ///< [M] i32: row of each pair
  Tensor offsets;  ///< [E + 1] i32: first row of each expert, and M
  Tensor counts;   ///< [E], `count_dtype`: rows of each expert
};
/// @param experts      [N, k] i32, contiguous, each in [0, count)
/// @param count_dtype  f32, whose counts are exact up to 2^24, or f64
/// @throws InvalidArgument on a shape or dtype that does not fit, or more than 256 experts
Grouping group_by_expert(const Tensor& experts, std::int64_t count, DType count_dtype = DType::F32);

/// The token's vector for each row.
///
/// @param x  [N, C], f64, f32 or bf16, contiguous
/// @return   [M, C], dtype of x
/// @grad     x; keeps grouping.place
Tensor spread_rows(const Tensor& x, const Grouping& grouping);

/// For each token, the sum of its pairs' rows times weights, in the order of its experts.
///
/// @param rows     [M, C], f64, f32 or bf16, contiguous
/// @param weights  [N, k], f32 (f64 for f64), contiguous
/// @return         [N, C], dtype of rows; accumulates in f32 (f64 for f64)
/// @grad           rows, weights; keeps both
Tensor collect_rows(const Tensor& rows, const Tensor& weights, const Grouping& grouping);

/// Gated MLPs without biases, each on the rows of its expert: y = (act(gate) * up) W_down^T, where
/// gate and up are the halves of x W_up^T. An expert without rows has zero gradients.
///
/// Runs experts first, first + 1, ..., as many as there are weights. To run a layer's experts one by
/// one, pass the same `hidden` and the result before: rows of other experts are carried over.
///
/// @param x       [M, C], f64, f32 or bf16, contiguous
/// @param up      weights [2 H, C] of each expert, gate first, dtype of x
/// @param down    weights [C, H] of each expert, dtype of x
/// @param hidden  [M, 2 H], dtype of x: overwritten; its rows must stay until backward
/// @param before  [M, C], dtype of x: the result before, or any tensor; its memory is the result's
/// @return        [M, C], dtype of x
/// @grad          x, weights, before; keeps x, hidden and weights
/// @throws InvalidArgument on a shape, dtype or context that does not fit
Tensor expert_mlps(const Tensor& x, const Grouping& grouping, std::int64_t first,
                   const std::vector<Tensor>& up, const std::vector<Tensor>& down, Gate gate,
                   const Tensor& hidden, const Tensor& before);

}  // namespace tessera::ops
