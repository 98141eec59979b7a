#pragma once

#include <string>

namespace tessera::kernels {

struct DeviceBenchOptions {
  std::string plugin = {};  ///< see load_device_backend
  std::string only = {};    ///< substring of the kernels' names; empty: all
  std::string json = {};    ///< also write results to this file; empty: none
  std::int64_t batch = 64;  ///< sequences of 1024 tokens
  bool quick = false;       ///< tiny shapes and one sample, to test the benchmark
};

/// Times kernels on a GPU, those of a bf16 GPT-2 124M step first, and prints each kernel's share of
/// the roof: a copy of 1 GiB, or an 8192^3 product in the kernel's compute dtype, in the same run.
///
/// A sample is the host time of enough launches for some milliseconds, between two device
/// synchronizations. Bytes count each operand once. Each result is written at once.
/// @return number of kernels that failed and were left out
/// @throws Unsupported without such a device, IoError if the file can't be written
int run_device_bench(const DeviceBenchOptions& options);

}  // namespace tessera::kernels
