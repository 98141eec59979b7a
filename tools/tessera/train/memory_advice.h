#pragma once

#include <functional>
#include <string>

#include "core/base/context.h"
#include "tools/tessera/config/config.h"
#include "tools/tessera/report/advice.h"

namespace tessera::tools {

/// Flags that would reduce a run's memory, the least intrusive first.
/// @param config  validated
MemoryAdvice memory_advice(const Config& config, int world_size, DeviceType device);

/// Runs `work` and returns its result. Adds the memory ledger and advice to an OutOfMemory error.
int with_memory_advice(const Config& config, int world_size, const Context& context,
                       const std::function<int()>& work);

}  // namespace tessera::tools
