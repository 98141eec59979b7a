#pragma once

#include <string_view>

#include "core/base/device.h"
#include "models/gpt2_config.h"

namespace tessera::tools {

/// @param cpu_flag  flag that selects the CPU, for the message: "--device cpu"
/// @throws Unsupported if head_dim exceeds the limit of the GPU kernels
void require_head_dim(const models::Gpt2Config& model, Device device, std::string_view cpu_flag);

}  // namespace tessera::tools
