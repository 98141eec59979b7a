#pragma once

#include <string>

#include "core/base/system_memory.h"
#include "tools/tessera/train/memory_plan.h"

namespace tessera::tools {

/// What a run needs of a memory, and what there is.
struct MemoryNeed {
  MemoryPlan plan{};
  int ranks = 1;        ///< that share it
  SystemMemory memory;  ///< zeros if it is not known: nothing is said then
  std::string there;    ///< before the amount: "this host has", "cuda:0 has"
};

/// Compares before anything is taken.
/// @param refuse  what even the whole memory can't hold; else that is a warning, too
/// @return a warning if what is available may not do; else empty
/// @throws OutOfMemory with the plan by category. What would need less is up to the caller
std::string check_memory(const MemoryNeed& need, bool refuse);

}  // namespace tessera::tools
