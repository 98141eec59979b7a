#pragma once

/// Tensors, operations, gradients, modules, optimizers and sharding. Included separately: train.h,
/// data.h, checkpoint.h, consolidate.h, models.h, comm.h, testing.h, and extend.h for own kernels.
///
///     const auto context = tessera::Context::create();
///     const auto x = tessera::Tensor::from(context, {{1, 2}, {3, 4}});
///     fmt::print("{}\n", tessera::ops::mean(x * x));

#include <tessera/autograd.h>
#include <tessera/nn.h>
#include <tessera/ops.h>
#include <tessera/optim.h>
#include <tessera/sharding.h>
#include <tessera/tensor.h>
#include <tessera/version.h>
