#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// Sum of the cross-entropies of rows of logits, times `scale`. An ordinary operation: losses can be
/// added up and weighted, in contrast to linear_cross_entropy, which saves the memory of logits.
///
/// @param logits   [N, V], f64, f32 or bf16, contiguous
/// @param targets  [N] i32, in [0, V), or -1 to ignore the row
/// @param scale    factor of loss and gradients, e.g. 1 / N for the mean
/// @return         [1], f32 (f64 for f64): scale * sum of -log softmax(logits)[target], nats
/// @grad           logits; keeps logits and targets, and backward needs memory for logits in f32
/// @throws InvalidArgument on a shape, dtype or context that does not fit, and on a target outside
///   the vocabulary, with its row and value; on a GPU such a target gives NaN instead
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, double scale = 1.0);

/// Sum of the cross-entropies of a linear classifier, times `scale`: the head and the loss in one.
///
/// Works on chunks of rows, so that N x V logits of more than 64 MiB never exist at once. With recording
/// on, forward also computes the gradients of x and weight from each chunk's logits and accumulates the
/// gradient of weight in its leaf. So the result must be the root of backward, or a term of a sum
/// that is (a gradient other than 1 is an error: use `scale`), and evaluation belongs under
/// NoGradGuard.
///
/// @param x        [N, C], f64, f32 or bf16, contiguous
/// @param weight   [V, C], dtype of x; a leaf if it requires a gradient
/// @param targets  [N] i32, in [0, V), or -1 to ignore the row
/// @param scale    factor of loss and gradients, e.g. 1 / (tokens of the whole step)
/// @param max_chunk_rows  rows of logits alive at a time; 0: automatic
/// @param softcap  > 0: a logit l becomes softcap * tanh(l / softcap), as in Gemma 2
///
/// Logits are in the accumulator dtype; on a GPU in x's dtype, where a target outside the
/// vocabulary gives NaN instead of an error.
/// @return         [1], f32 (f64 for f64): scale * sum of -log softmax(x W^T)[target], nats
/// @grad           x, weight
/// @throws InvalidArgument on a target outside the vocabulary, with its row and value
/// Source of the fusion: Hsu et al. 2024 (Liger kernels), arXiv:2410.10989, section 3.2.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            double scale, std::int64_t max_chunk_rows = 0, double softcap = 0.0);

}  // namespace tessera::ops
