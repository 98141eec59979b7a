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
/// the rest. Halves `slice` while the memory does not fit, or is not there. The caller keeps the slice for
/// later calls, because each failing allocation synchronizes the device and trims its memory pool, and
/// because a run should use one kernel per shape: 0, without memory for one sequence, is final.
/// @param plan_of  const LibraryPlan& (std::int64_t sequences)
/// @param fits  whether so many bytes are allowed: bool (std::int64_t bytes, std::int64_t sequences)
/// @return empty, or why the library can't run
template <typename PlanOf, typename Fits>
std::string take_sliced_workspace(Context& context, const char* owner, std::int64_t batch,
                                  PlanOf&& plan_of, Fits&& fits, std::int64_t& slice,
                                  std::optional<Workspace>& into) {
  while (slice > 0) {
    std::int64_t bytes = 0;
    for (const std::int64_t sequences : {slice, batch % slice}) {
      if (sequences == 0) continue;
      const LibraryPlan& plan = plan_of(sequences);
      if (!plan.why_not.empty()) return plan.why_not;
      bytes = std::max(bytes, plan.workspace_bytes);
    }
    const bool allowed = fits(bytes, slice);
    if (!allowed && slice == 1)
      return fmt::format("its workspace would be {}", format_bytes(bytes));
    if (allowed) {
      try {
        into.emplace(context, static_cast<std::size_t>(bytes), owner);
        return {};
      } catch (const OutOfMemory&) {  // with a smaller slice, or not at all
      }
    }
    slice = slice == 1 ? 0 : (slice + 1) / 2;
  }
  return "there was no memory for its workspace, and it is not tried again";
}

}  // namespace tessera::kernels::cuda
