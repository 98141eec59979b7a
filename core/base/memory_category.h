#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

/// Purpose of a block of memory.
enum class MemoryCategory : std::uint8_t {
  Parameters,      ///< this rank's master weights
  Gradients,       ///< flat gradient buffers and reduced segments
  OptimizerState,  ///< moments
  Gathered,        ///< gathered parameters in the compute dtype
  Activations,     ///< results of operations, saved tensors
  Workspace,       ///< scratch of one operation
  Communication,   ///< staging of collectives
  Staging,         ///< copies for saving
  Data,            ///< token batches
};
inline constexpr int kMemoryCategories = 9;
std::string_view memory_category_name(MemoryCategory category);

}  // namespace tessera
