#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/base/context.h"
#include "tools/tessera/train/setup.h"

namespace tessera::tools {

/// Bytes that a rank will hold at most, by MemoryCategory. Scratch of kernels and of collectives is
/// not in it, but for what the communicator holds already.
using MemoryPlan = std::array<std::int64_t, kMemoryCategories>;

/// Takes no memory for it: the parameters' layout says what is held, and a training step on the
/// meta device how large activations get.
MemoryPlan plan_memory(const RunSetup& setup, int world_size, const Context& context);

std::int64_t total(const MemoryPlan& plan);
/// "parameters 137.5 KiB, gradients 137.5 KiB, ..."
std::string describe(const MemoryPlan& plan);

}  // namespace tessera::tools
