#pragma once

/// Differentiable operations. Operators +, -, * and / are those of elementwise.h.
///
///     const Tensor y = ops::softmax(ops::matmul(q, ops::transpose(k, -1, -2)) / 8.0);

#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/experts.h"
#include "core/ops/linear.h"
#include "core/ops/matmul.h"
#include "core/ops/norm.h"
#include "core/ops/reduction.h"
#include "core/ops/rotary.h"
#include "core/ops/selection.h"
#include "core/ops/shape.h"
#include "core/ops/softmax.h"
#include "core/ops/unary.h"
#include "core/ops/view.h"
