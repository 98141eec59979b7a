#pragma once

/// Gradient checks of own operations and modules.
///
///     Tensor x = Tensor::from(context, {1, 2, 3}, DType::F64).set_requires_grad(true);
///     const auto cube = [](const std::vector<Tensor>& t) { return t[0] * t[0] * t[0]; };
///     if (const auto result = testing::gradcheck(cube, {x}); !result) fmt::print("{}\n", result);

#include "core/testing/gradcheck.h"
