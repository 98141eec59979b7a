#pragma once

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

/// Allocates the scratch memory of a call. On failure it disables the plan for good, because each
/// failing allocation synchronizes the device and trims its memory pool, and because a run should
/// use one kernel per shape.
/// @return false, with plan.why_not set, if the plan can't be used
inline bool take_workspace(Context& context, LibraryPlan& plan, const char* owner,
                           std::optional<Workspace>& into) {
  if (!plan.why_not.empty()) return false;
  try {
    into.emplace(context, static_cast<std::size_t>(plan.workspace_bytes), owner);
  } catch (const OutOfMemory&) {
    plan.why_not =
        fmt::format("there was no memory for its workspace of {}, and it is not tried again",
                    format_bytes(plan.workspace_bytes));
    return false;
  }
  return true;
}

}  // namespace tessera::kernels::cuda
