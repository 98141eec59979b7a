#pragma once

#include <string>

#include "core/base/system_memory.h"
#include "tools/tessera/train/memory_plan.h"

namespace tessera::tools {

/// A run's need of a memory and the memory's size.
struct MemoryNeed {
  MemoryPlan plan{};
  int ranks = 1;        ///< that share it
  SystemMemory memory;  ///< zeros: unknown, no check
  std::string there;    ///< for messages: "this host has", "cuda:0 has"
};

/// Compares need and memory before anything is allocated.
/// @param refuse  throw if the need exceeds the whole memory; else warn
/// @return a warning if the need exceeds the available memory; else empty
/// @throws OutOfMemory with the plan by category
std::string check_memory(const MemoryNeed& need, bool refuse);

}  // namespace tessera::tools
