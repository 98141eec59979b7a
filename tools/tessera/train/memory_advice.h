#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/base/context.h"
#include "tools/tessera/config/config.h"
#include "tools/tessera/report/advice.h"

namespace tessera::tools {

/// Plans the peak of a rank in bytes; nothing for a configuration that is not valid.
using PlanPeak = std::function<std::optional<std::int64_t>(const Config& config)>;

/// A changed configuration that was planned.
struct MemoryChange {
  std::string flags;
  std::string why;
  std::int64_t peak = 0;  ///< bytes
};

/// Plans changes of the configuration, each alone, and returns those that reduce the peak, the least
/// intrusive first.
/// @param config  validated
std::vector<MemoryChange> memory_changes(const Config& config, int world_size,
                                         const PlanPeak& peak);

/// Flags that would reduce a run's memory, and to what.
MemoryAdvice memory_advice(const Config& config, int world_size, DeviceType device,
                           const PlanPeak& peak);

/// Runs `work` and returns its result. Adds the memory ledger and advice to an OutOfMemory error.
int with_memory_advice(const Config& config, int world_size, const Context& context,
                       const PlanPeak& peak, const std::function<int()>& work);

}  // namespace tessera::tools
