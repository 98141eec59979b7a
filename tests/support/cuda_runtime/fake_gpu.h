#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <vector>

/// As cuda_runtime.h has it, for nvcc alone. To be included before kernels/cuda/launch.h.
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

namespace tessera::test {

/// A GPU that is not there: what the CUDA runtime, defined here over host memory, says of one. A
/// program that links this instead of the real runtime has one fake GPU.
///
/// Work on a stream is done as late as the runtime's contract allows: when somebody waits for it.
/// So memory that is reused too early, or read before it is waited for, shows.
struct FakeGpu {
  cudaError_t driver = cudaSuccess;  ///< cudaGetDeviceCount's answer
  int driver_version = 13000;        ///< 0: no driver
  int count = 1;                     ///< GPUs
  int major = 9, minor = 0;          ///< compute capability
  std::string name = "Fake H100";
  bool has_pools = true;
  std::size_t bytes = std::size_t{1} << 30;  ///< of its memory
  int shared_bytes = 227 * 1024;             ///< that a block may have
  /// What the next calls of a function, by its name, return; after these they succeed.
  std::map<std::string, std::deque<cudaError_t>> fails;

  std::map<std::string, int> calls;  ///< by name of the function
  std::map<std::string, int> alive;  ///< "stream", "event", "pool", "pinned", "device"
  std::size_t used = 0, reserved = 0;
  std::vector<const void*> launched;  ///< kernels, when they were done
};

/// The one that the runtime tells of.
FakeGpu& fake_gpu();

}  // namespace tessera::test
