#pragma once

#include <cstdint>
#include <string_view>

#include "models/arch.h"
#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Floating-point operations that training needs per token, for model FLOPs utilization: matrix products and attention,
/// forward and backward, over the scores that are not masked. Recomputation and the optimizer do not count, nor do the
/// gradients of frozen weights. For a decoder whose weights are all trained, about 6 N + 6 L C T.
/// @param arch  with the vocabulary, as in the run
double model_flops_per_token(const Config& config, const models::Arch& arch);

/// Peak of a device's matrix products by its data sheet, dense, in operations per second; 0: not known.
/// @param device     DeviceBackend::description(), or a part of it: "NVIDIA H100 80GB HBM3"
/// @param precision  train.precision
double peak_flops(std::string_view device, std::string_view precision);

/// Model FLOPs utilization of a run at one token per second: model_flops_per_token() over the peak of all devices.
/// 0: the peak is not known.
/// @param device   of all ranks, as for peak_flops()
/// @param devices  number of devices; ranks may share one
double mfu_per_rate(const Config& config, const models::Arch& arch, std::string_view device,
                    std::int64_t devices);

}  // namespace tessera::tools
