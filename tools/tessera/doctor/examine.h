#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/base/cpu_level.h"

namespace tessera::tools {

/// The machine's resources.
struct Machine {
  std::string processor;  ///< model name, or "unknown"
  CpuLevel level = CpuLevel::Generic;
  int threads = 1;                      ///< available to this process
  std::int64_t memory_total = 0;        ///< bytes; the container's limit if that is lower
  std::int64_t memory_available = 0;    ///< bytes; the lower of machine and container
  std::int64_t open_files = 0;          ///< soft limit
  std::int64_t shared_memory_free = 0;  ///< bytes of /dev/shm; -1 if there is none
};
/// @param cgroup  directory of the container's control group, version 2; may be absent
Machine examine_machine(const std::filesystem::path& cgroup = "/sys/fs/cgroup");

/// Whether a directory, or the nearest parent that exists, can be written to.
struct DirectoryState {
  bool writable = false;
  std::string problem;          ///< empty if writable
  std::int64_t free_bytes = 0;  ///< for this user
};
DirectoryState examine_directory(const std::filesystem::path& path);

/// An optional plugin and the machine's libraries that it needs; whether there is a GPU or not.
struct Library {
  std::string name;
  bool in_build = false;    ///< the plugin's file is there
  bool on_machine = false;  ///< the libraries that the plugin needs can be loaded
  std::string problem;      ///< why not; else empty
  std::string cost;         ///< of going without
  bool found() const { return in_build && on_machine; }
};
/// CUDA backend, attention by cuDNN, NCCL.
std::vector<Library> examine_libraries();

/// The GPUs and the libraries used on them.
struct Gpus {
  std::vector<std::string> descriptions;  ///< of usable GPUs
  std::string problem;                    ///< why there are none, or which fails; else empty
  std::vector<std::string> notes;         ///< which kernels are used, and why
  std::string nccl;                       ///< its version; empty if it can't be used
  std::string nccl_problem;               ///< why not
  bool driver_fails = false;              ///< a driver is loaded, but no GPU can be used
  /// True without a GPU, false if one fails.
  bool healthy() const { return problem.empty() || (descriptions.empty() && !driver_fails); }
};
/// @param driver  a file that exists while NVIDIA's driver is loaded
Gpus examine_gpus(const std::filesystem::path& driver = "/proc/driver/nvidia/version");

/// A float32 matrix product of the CPU kernels, checked against double precision and timed.
struct ProductResult {
  double largest_error = 0;  ///< relative to the sum of absolute products
  bool correct = false;
  double gflops = 0;  ///< best of several rounds
};
ProductResult examine_product(int threads, CpuLevel level);

}  // namespace tessera::tools
