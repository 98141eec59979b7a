#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/base/context.h"
#include "tools/tessera/train/setup.h"

namespace tessera::tools {

/// Planned peak bytes of a rank by MemoryCategory, without scratch of kernels and collectives.
using MemoryPlan = std::array<std::int64_t, kMemoryCategories>;

/// Computes the plan from the parameters' layout and a training step on the meta device.
MemoryPlan plan_memory(const RunSetup& setup, int world_size, const Context& context);

std::int64_t total(const MemoryPlan& plan);
/// "parameters 137.5 KiB, gradients 137.5 KiB, ..."
std::string describe(const MemoryPlan& plan);

}  // namespace tessera::tools
