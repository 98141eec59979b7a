#pragma once

#include <map>
#include <span>
#include <string>

#include "comm/planned.h"
#include "core/base/kernel_rates.h"

namespace tessera::tools {

/// A device and its links, for `plan --time`.
struct DeviceRates {
  KernelRates kernels;
  comm::Links links{};    ///< in_host 0: not known
  double peak_flops = 0;  ///< of bf16 products per second, by the data sheet; 0: not known
  std::string name = {};  ///< where they are from
};

/// Rates measured on an H100 SXM: kernels of GPT-2's shapes in bf16.
DeviceRates h100_rates();

/// Rates fitted to the kernels in traces that `train --train.profile` wrote. Links are unknown, and take no time
/// beside that of their bytes.
/// @param wanted  what the profiles' "otherData" must say: device, precision, ...
/// @throws IoError, InvalidArgument
DeviceRates rates_of_profiles(std::span<const std::string> files,
                              const std::map<std::string, std::string>& wanted);

}  // namespace tessera::tools
