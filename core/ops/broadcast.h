#pragma once

#include <string_view>

#include "core/autograd/autograd.h"

namespace tessera::ops {

// Broadcasting as NumPy does it: shapes are aligned at the last dim; missing dims and dims of size 1
// are repeated.

/// The common shape. @param names  arguments, for the message: "a and b"
/// @throws InvalidArgument if two sizes differ and neither is 1
Shape broadcast_shape(std::string_view operation, std::string_view names, const Shape& a,
                      const Shape& b);

/// A view of `shape` that repeats the elements of x.
TensorView broadcast_view(const Tensor& x, const Shape& shape);

/// Passes scale * grad on as the gradient of input i, summed over the dims that were repeated.
/// @param grad   dense, of the broadcast shape
/// @param shape  of the input
void pass_sum(autograd::InputGradients& into, int i, const Shape& shape, const Tensor& grad,
              double scale = 1.0);

}  // namespace tessera::ops
