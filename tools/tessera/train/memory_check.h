#pragma once

#include <string>

#include "core/base/system_memory.h"
#include "tools/tessera/train/memory_plan.h"

namespace tessera::tools {

/// Planned use of a host's or GPU's memory, and its size.
struct MemoryNeed {
  MemoryPlan plan{};
  int ranks = 1;        ///< that share the memory
  SystemMemory memory;  ///< zeros: unknown, no check
  std::string there;    ///< for messages: "this host has", "cuda:0 has"
};

/// Compares the plan with the memory before anything is allocated.
/// @param refuse  throw if the plan exceeds the total memory; else warn
/// @return a warning if the plan exceeds the available memory; else empty
/// @throws OutOfMemory with the plan by category
std::string check_memory(const MemoryNeed& need, bool refuse);

}  // namespace tessera::tools
