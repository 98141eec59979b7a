#pragma once

#include <functional>
#include <string>

#include "core/base/context.h"
#include "tools/tessera/config/config.h"
#include "tools/tessera/report/advice.h"

namespace tessera::tools {

/// Flags that would lower a run's memory, the mildest first.
/// @param config  validated
MemoryAdvice memory_advice(const Config& config, int world_size, DeviceType device);

/// Runs `work` and adds ledger and advice to an OutOfMemory that it throws.
int with_memory_advice(const Config& config, int world_size, const Context& context,
                       const std::function<int()>& work);

}  // namespace tessera::tools
