#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera::test {

/// A fake GPU behind a CUDA runtime that is implemented over host memory. Linked in place of the
/// real runtime. Queued work runs only when the host waits for it, the latest that CUDA allows:
/// early reuse and unsynchronized reads show.
struct FakeGpu {
  cudaError_t driver = cudaSuccess;  ///< cudaGetDeviceCount's answer
  int driver_version = 13000;        ///< 0: no driver
  int count = 1;
  int major = 9, minor = 0;
  std::string name = "Fake H100";
  bool has_pools = true;
  std::size_t bytes = std::size_t{1} << 30;  ///< device memory
  int shared_bytes = 227 * 1024;             ///< limit per block
  std::set<std::pair<int, int>> peers;       ///< (device, device whose memory it can access)
  /// Status of the next calls, by function name; then calls succeed.
  std::map<std::string, std::deque<cudaError_t>> fails;

  std::map<std::string, int> calls;      ///< by function name
  std::map<std::string, int> alive;      ///< "stream", "event", "pool", "pinned", "device"
  std::set<std::pair<int, int>> access;  ///< (device, device whose pool it may access)
  std::size_t used = 0, reserved = 0;
  std::vector<const void*> launched;  ///< executed kernels, in order
};

FakeGpu& fake_gpu();

}  // namespace tessera::test
