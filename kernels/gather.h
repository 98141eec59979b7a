#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// y[i, j, k] = x[i, index[i, j, k], k], for dim 1 of three dims.
///
/// x      f64, f32 or bf16, any strides
/// index  i32, as many dims as x; sizes other than that of dim are at most those of x. One outside
///        [0, size of dim) gives NaN.
/// y      shape of index, dtype of x, any strides
struct Gather {
  TensorView x, index, y;
  int dim = 0;
};
void gather(Context& context, const Gather& args);

/// x[i, index[i, j, k], k] += y[i, j, k]: the gradient of gather, summed in ascending order of j.
///
/// y  f64, f32 or bf16, shape of index, any strides
/// x  accumulator dtype of y, any strides. An index outside of it is ignored.
struct ScatterAdd {
  TensorView y, index, x;
  int dim = 0;
};
void scatter_add(Context& context, const ScatterAdd& args);

}  // namespace tessera::kernels
