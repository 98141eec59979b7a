#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/base/context.h"
#include "core/base/system_memory.h"
#include "tools/tessera/report/advice.h"
#include "tools/tessera/train/setup.h"

namespace tessera::tools {

/// Planned peak bytes of a rank by MemoryCategory, without scratch of kernels and collectives.
using MemoryPlan = std::array<std::int64_t, kMemoryCategories>;

/// Computes the plan from the parameters' layout and a training step on the meta device.
MemoryPlan plan_memory(const RunSetup& setup, int world_size, const Context& context);

std::int64_t total(const MemoryPlan& plan);
/// "parameters 137.5 KiB, gradients 137.5 KiB, ..."
std::string describe(const MemoryPlan& plan);

/// Planned use of a host's or GPU's memory, and its size.
struct MemoryNeed {
  MemoryPlan plan{};
  int ranks = 1;        ///< number of ranks that share the memory
  SystemMemory memory;  ///< zeros if unknown; then nothing is checked
  std::string there;    ///< for messages: "this host has", "cuda:0 has"
};

/// Compares the plan with the memory before anything is allocated.
/// @param refuse  throw if the plan exceeds the total memory; else warn
/// @return a warning if the plan exceeds the available memory; else empty
/// @throws OutOfMemory with the plan by category, and the advice
std::string check_memory(const MemoryNeed& need, const MemoryAdvice& advice, bool refuse);

}  // namespace tessera::tools
