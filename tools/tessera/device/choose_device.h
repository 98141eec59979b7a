#pragma once

#include <string>

#include "core/base/device.h"

namespace tessera::tools {

/// Where to compute.
struct DeviceChoice {
  Device device;
  std::string why_cpu;  ///< why "auto" takes the processor, in words; else empty
};

/// @param wanted  auto: a GPU if one can be used, else the processor; cpu; cuda: the GPU of this
///   rank; cuda:N: that one
/// @param local_rank  of this process on its host; ranks beyond the number of GPUs share them
/// @throws InvalidArgument on another word, Unsupported naming what a GPU that was asked for lacks
DeviceChoice choose_device(const std::string& wanted, int local_rank);

}  // namespace tessera::tools
