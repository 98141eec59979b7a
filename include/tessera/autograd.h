#pragma once

/// Gradients: backward(), recomputation, and record() for operations of one's own.
///
///     Tensor w = Tensor::full(context, {3}, DType::F32, 2.0).set_requires_grad(true);
///     autograd::backward(ops::sum(w * w));
///     w.grad();                                   // 2 w

#include "core/autograd/autograd.h"
