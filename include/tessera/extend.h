#pragma once

/// Kernels of one's own: views of tensors, checks, scratch memory, and CUDA launches, which
/// tessera::fiber also compiles for the host. Include it from .cu files, too.
///
///     __global__ void cube_kernel(std::int64_t n, const float* x, float* y) { ... }
///     kernels::cuda::launch(context, "cube", cube_kernel, {.grid = 4, .block = 256}, n, x, y);

#include "core/base/context.h"
#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "core/base/rng.h"
#include "core/base/tensor_view.h"
#include "core/base/thread_pool.h"
#include "core/ops/checks.h"
#include "kernels/cuda/launch.h"
#include "kernels/workspace.h"

#if defined(__CUDACC__) || defined(TESSERA_FIBER)
#include "kernels/cuda/device/number.h"
#include "kernels/cuda/device/platform.h"
#include "kernels/cuda/device/reduce.h"
#endif
