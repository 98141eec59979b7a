#pragma once

namespace tessera {
class Context;
}

/// Exports tessera::kernels::cuda::name(Context&, const Args&) to the backend.
#define TESSERA_CUDA_KERNEL(name, Args)                                         \
  extern "C" __attribute__((visibility("default"))) void tessera_kernel_##name( \
      ::tessera::Context& context, const void* args) {                          \
    ::tessera::kernels::cuda::name(context, *static_cast<const Args*>(args));   \
  }
