#pragma once

#include <string_view>

#include "core/base/device.h"
#include "models/gpt2_config.h"

namespace tessera::tools {

/// Better before weights are loaded than in the first step.
/// @param cpu_flag  that takes the processor instead: "--device cpu"
/// @throws Unsupported if the model's heads are wider than the kernels of a GPU take
void require_head_dim(const models::Gpt2Config& model, Device device, std::string_view cpu_flag);

}  // namespace tessera::tools
