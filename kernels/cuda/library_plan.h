#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "core/base/context.h"
#include "core/base/error.h"
#include "core/base/memory.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {

/// Execution plan of a library for arguments of one shape, or the reason why there is none.
struct LibraryPlan {
  std::int64_t workspace_bytes = 0;
  std::string why_not = {};  ///< empty: usable
};

/// Allocates the scratch memory of calls that take `slice` of `batch` sequences each, and the last one
/// the rest. Halves `slice` while the memory would be more than most_bytes, or is not there. The
/// caller keeps the slice for the next call, because each failing allocation synchronizes the device
/// and trims its memory pool.
/// @param plan_of  const LibraryPlan& (std::int64_t sequences)
/// @return empty, or why the library can't run
template <typename PlanOf>
std::string take_sliced_workspace(Context& context, const char* owner, std::int64_t batch,
                                  std::int64_t most_bytes, PlanOf&& plan_of, std::int64_t& slice,
                                  std::optional<Workspace>& into) {
  while (true) {
    std::int64_t bytes = 0;
    for (const std::int64_t sequences : {slice, batch % slice}) {
      if (sequences == 0) continue;
      const LibraryPlan& plan = plan_of(sequences);
      if (!plan.why_not.empty()) return plan.why_not;
      bytes = std::max(bytes, plan.workspace_bytes);
    }
    std::string why_not;
    if (bytes > most_bytes) {
      why_not = fmt::format("its workspace would be {}", format_bytes(bytes));
    } else {
      try {
        into.emplace(context, static_cast<std::size_t>(bytes), owner);
        return {};
      } catch (const OutOfMemory&) {
        why_not = fmt::format("there was no memory for its workspace of {}", format_bytes(bytes));
      }
    }
    if (slice == 1) return why_not;
    slice = (slice + 1) / 2;
  }
}

}  // namespace tessera::kernels::cuda
