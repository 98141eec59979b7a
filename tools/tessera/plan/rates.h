#pragma once

#include <span>
#include <string>

#include "comm/planned.h"
#include "core/base/kernel_rates.h"

namespace tessera::tools {

/// A device and its links, for `plan --time`.
struct DeviceRates {
  KernelRates kernels;
  double between_steps = 0;  ///< seconds
  comm::Links links{};       ///< in_host 0: not known
  double peak_flops = 0;     ///< of bf16 products per second, by the data sheet; 0: not known
  std::string name = {};     ///< where they are from
};

/// Rates measured on an H100 SXM: kernels of GPT-2's shapes in bf16.
DeviceRates h100_rates();

/// Rates fitted to the kernels in traces that `train --train.profile` wrote. Links are unknown, and take no time
/// beside that of their bytes.
/// @param device, precision  of the planned run, "cuda" or "cpu"; the profiles must have them, and one rank
/// @throws IoError, InvalidArgument
DeviceRates rates_of_profiles(std::span<const std::string> files, const std::string& device,
                              const std::string& precision);

}  // namespace tessera::tools
