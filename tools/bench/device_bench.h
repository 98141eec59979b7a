#pragma once

#include <string>

namespace tessera::kernels {

struct DeviceBenchOptions {
  std::string plugin = {};  ///< see load_device_backend
  std::string only = {};    ///< part of the names of what is measured; empty: all
  std::string json = {};    ///< file that takes the results, too; empty: none
  std::int64_t batch = 64;  ///< sequences of 1024 tokens
  bool quick = false;       ///< tiny shapes, one sample: shows that all of it runs
};

/// Times kernels on a device, those of a GPT-2 124M step in bf16 first, and prints, for each, its
/// share of the roof: what a copy of 1 GiB and an 8192^3 product (in bf16; for kernels that compute
/// products of float32, in float32) reach in the same run.
///
/// Samples are host time around as many launches as take some milliseconds, between two waits for
/// the device. Bytes are the fewest a kernel has to move: each operand once. Each line is written
/// as soon as it is measured.
/// @returns how many kernels were left out since they failed
/// @throws Unsupported if there is no such device, IoError if the file can't be written
int run_device_bench(const DeviceBenchOptions& options);

}  // namespace tessera::kernels
