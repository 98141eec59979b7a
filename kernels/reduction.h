#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// out = scale * sum of in over the dims in which out has size 1 (+= if out.accumulate).
///
/// in   f64, f32 or bf16, any strides
/// out  as many dims as in, each of the same size or 1; dtype of in or its accumulator dtype.
/// Partial sums in f32 (f64 for f64) are added up in f64, in an order that depends on the shapes
/// only.
struct SumTo {
  TensorView in;
  GradientView out;
  double scale = 1.0;
};
void sum_to(Context& context, const SumTo& args);

/// Largest element along the middle dim, and the place of the first one. NaN counts as the largest.
///
/// in       [A, N, B], f64, f32 or bf16, contiguous, N from 1 to 2^31 - 1
/// values   [A, B], dtype of in; optional
/// indices  [A, B] i32; optional
struct MaxAlong {
  TensorView in;
  TensorView values{};
  TensorView indices{};
};
void max_along(Context& context, const MaxAlong& args);

/// The two loops of a SumTo: over the elements of out, and over the elements of in that add up to
/// the first of them. Views: 0 is in, 1 is out.
struct SumToLoops {
  struct Views {
    TensorView in, out;
  };
  explicit SumToLoops(const SumTo& args);
  Views kept, summed;
};

}  // namespace tessera::kernels
