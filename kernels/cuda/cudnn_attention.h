#pragma once

#include <string>

#include "kernels/attention.h"

namespace tessera::cuda {
class CudaBackend;
}

namespace tessera::kernels::cuda {

/// Attention by cuDNN: a library of its own, libtessera_cudnn.so, so that the CUDA backend loads
/// where cuDNN is missing.
class CudnnAttention {
 public:
  virtual ~CudnnAttention() = default;
  /// "cuDNN 9.19.0"
  virtual std::string version() const = 0;
  /// Queues the work.
  /// @return empty, or why cuDNN does not support these arguments; then nothing was queued
  /// @throws CudaError if cuDNN fails at what it said it could do
  virtual std::string forward(Context& context, const AttentionForward& args) = 0;
  virtual std::string backward(Context& context, const AttentionBackward& args) = 0;
};

/// Runs attention by cuDNN where that is there and serves; notes in the backend which one runs, and
/// why. @return false: the own kernel must serve
bool attention_forward_by_library(Context& context, const AttentionForward& args);
bool attention_backward_by_library(Context& context, const AttentionBackward& args);

}  // namespace tessera::kernels::cuda
