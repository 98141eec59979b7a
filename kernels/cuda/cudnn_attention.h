#pragma once

#include <string>

#include "kernels/attention.h"

namespace tessera::cuda {
class CudaBackend;
}

namespace tessera::kernels::cuda {

/// Plain causal attention by cuDNN, in a separate library, libtessera_cudnn.so, so that the CUDA backend loads
/// without cuDNN.
class CudnnAttention {
 public:
  virtual ~CudnnAttention() = default;
  /// For example "cuDNN 9.19.0".
  virtual std::string version() const = 0;
  /// Queues the work. @return empty, or why cuDNN can't run these arguments; then nothing is queued
  /// @throws CudaError if cuDNN fails after accepting them
  virtual std::string forward(Context& context, const AttentionForward& args) = 0;
  virtual std::string backward(Context& context, const AttentionBackward& args) = 0;
};

/// Runs attention by cuDNN if it can; notes in the backend which implementation runs, and why.
/// @return false if tessera's own kernel must run
bool attention_forward_by_library(Context& context, const AttentionForward& args);
bool attention_backward_by_library(Context& context, const AttentionBackward& args);

}  // namespace tessera::kernels::cuda
