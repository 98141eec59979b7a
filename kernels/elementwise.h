#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// y = a + b; same shape and dtype, contiguous. y may be a or b.
void add(Context& context, const TensorView& a, const TensorView& b, const TensorView& y);
/// out = value. Any floating dtype, contiguous.
void fill(Context& context, const TensorView& out, double value);
/// out = scale * in (+= if out.accumulate), converting between f64, f32 and bf16; same shape.
/// Contiguous, or [R, C] with strided rows.
void cast(Context& context, const TensorView& in, const GradientView& out, double scale = 1.0);
/// Bias gradient: out[c] = sum over rows of in[r, c] (+= if out.accumulate), in a fixed order.
/// in  [R, C], rows may be strided; out  [C], accumulator dtype.
void sum_rows(Context& context, const TensorView& in, const GradientView& out);
/// out = scale * sum(in) (+= if out.accumulate), computed in f64, in an order that depends on the
/// number of elements only. in contiguous; out one element, f64 or the accumulator dtype.
void sum(Context& context, const TensorView& in, const GradientView& out, double scale = 1.0);

}  // namespace tessera::kernels
