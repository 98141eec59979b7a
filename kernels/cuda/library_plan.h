#pragma once

#include <optional>
#include <string>

#include "core/base/error.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {

/// How a library serves arguments of one shape, or why it does not.
struct LibraryPlan {
  std::int64_t workspace_bytes = 0;
  std::string why_not = {};  ///< empty: it serves
};

/// Takes the scratch memory of a call. Where there is none, the plan serves no more: a request that
/// fails makes the device stand still and give back what it keeps for reuse, which every layer of
/// every step would repeat; and a run is to have one kernel for a shape.
/// @return false, and plan.why_not says why, if the plan does not serve
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
