#pragma once

#include <functional>
#include <string>

#include "core/base/context.h"
#include "tools/tessera/config/config.h"
#include "tools/tessera/report/advice.h"

namespace tessera::tools {

/// What would make a run need less memory of the device, of what its configuration leaves: what
/// changes least first.
/// @param config  validated
MemoryAdvice memory_advice(const Config& config, int world_size, DeviceType device);

/// What `work` returns; an OutOfMemory that it throws gets the ledger, if it has none, and the
/// advice, if it is about the memory that this is for.
int with_memory_advice(const Config& config, int world_size, const Context& context,
                       const std::function<int()>& work);

}  // namespace tessera::tools
