#pragma once

#include <cstddef>
#include <type_traits>

#include "core/base/error.h"
#include "kernels/cuda/export.h"

#if defined(TESSERA_FIBER)
#include <fiber.h>  // of tests/support/fiber
#endif

namespace tessera::kernels::cuda {

struct LaunchShape {
  unsigned grid = 1;   ///< blocks
  unsigned block = 1;  ///< threads
  int shared_bytes = 0;
  unsigned grid_y = 1, grid_z = 1;
};

/// launch() below, untyped. @param params  addresses of the kernel's parameters
void launch_kernel(Context& context, const char* name, const void* kernel, const LaunchShape& shape,
                   void** params);

/// Starts a kernel on the context's stream.
/// @throws Unsupported if a block needs more shared memory than the device has, CudaError naming
/// the kernel and the shape if the device refuses it
template <typename... Params>
void launch([[maybe_unused]] Context& context, const char* name, void (*kernel)(Params...),
            const LaunchShape& shape, const std::type_identity_t<Params>&... args) {
#if defined(TESSERA_FIBER)
  require<Unsupported>(
      shape.shared_bytes <= fiber::most_shared_bytes(),
      "{}: a block needs {} bytes of shared memory, more than the {} that there are", name,
      shape.shared_bytes, fiber::most_shared_bytes());
  fiber::run_grid(name, {shape.grid, shape.grid_y, shape.grid_z}, {shape.block, 1, 1},
                  static_cast<std::size_t>(shape.shared_bytes),
                  [kernel, args...] { kernel(args...); });
#else
  void* params[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  launch_kernel(context, name, reinterpret_cast<const void*>(kernel), shape, params);
#endif
}

}  // namespace tessera::kernels::cuda
