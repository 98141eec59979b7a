#pragma once

/// Tensors, their context (device, threads, memory ledger), shapes, dtypes and errors.
///
///     const auto context = tessera::Context::create({.threads = 4});
///     const auto x = tessera::Tensor::from(context, {{1, 2}, {3, 4}});
///     fmt::print("{}\n", x);                      // values, shape, dtype, device

#include "core/base/error.h"
#include "core/base/memory_category.h"
#include "core/tensor.h"
#include "core/tensor_print.h"
