#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/base/cpu_level.h"

namespace tessera::tools {

struct Machine {
  std::string processor;  ///< model name, or "unknown"
  CpuLevel level = CpuLevel::Generic;
  int threads = 1;                      ///< available to this process
  std::int64_t memory_total = 0;        ///< bytes; the container's limit if that is lower
  std::int64_t memory_available = 0;    ///< bytes; the lower of host and container
  std::int64_t open_files = 0;          ///< soft limit
  std::int64_t shared_memory_free = 0;  ///< bytes of /dev/shm; -1 if there is none
};
/// @param cgroup  directory of the container's control group, version 2; may be absent
Machine examine_machine(const std::filesystem::path& cgroup = "/sys/fs/cgroup");

/// State of a directory, or of the nearest existing parent.
struct DirectoryState {
  bool writable = false;
  std::string problem;          ///< empty if writable
  std::int64_t free_bytes = 0;  ///< for this user
};
DirectoryState examine_directory(const std::filesystem::path& path);

/// An optional plugin and the system libraries that it needs, checked also without a GPU.
struct Library {
  std::string name;
  bool in_build = false;    ///< the plugin file exists
  bool on_machine = false;  ///< the system libraries can be loaded
  std::string problem;      ///< why one cannot be loaded; else empty
  std::string cost;         ///< effect of its absence
  bool found() const { return in_build && on_machine; }
};
/// Examines the CUDA backend, the cuDNN attention plugin, and NCCL.
std::vector<Library> examine_libraries();

struct Gpus {
  std::vector<std::string> descriptions;  ///< of usable GPUs
  std::string problem;                    ///< why there is no GPU, or which GPU fails; else empty
  std::vector<std::string> notes;         ///< which kernels are used, and why
  std::string nccl;                       ///< version; empty if unusable
  std::string nccl_problem;               ///< why NCCL is unusable
  bool driver_fails = false;              ///< a driver is loaded, but no GPU can be used
  /// True on a machine without a GPU, false if a GPU fails.
  bool healthy() const { return problem.empty() || (descriptions.empty() && !driver_fails); }
};
/// @param driver  file that exists while NVIDIA's driver is loaded
Gpus examine_gpus(const std::filesystem::path& driver = "/proc/driver/nvidia/version");

/// A float32 matmul on the CPU, checked against float64 and timed.
struct ProductResult {
  double largest_error = 0;  ///< relative to the sum of absolute products
  bool correct = false;
  double gflops = 0;  ///< best of several rounds
};
ProductResult examine_product(int threads, CpuLevel level);

}  // namespace tessera::tools
