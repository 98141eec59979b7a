#include "kernels/cuda/library_plan.h"

#include "core/base/memory.h"
#include "tests/kernels/kernel_support.h"
#include "tests/support/paths.h"

namespace tessera::test {
namespace {

using kernels::Workspace;
using kernels::cuda::LibraryPlan;
using kernels::cuda::take_workspace;

TEST_CASE("a plan without memory for its workspace is disabled for good") {
  if (gpu_only()) return;
  REQUIRE(::setenv("TESSERA_FIBER_MEMORY", "6000000", 1) == 0);
  with_plugin(fiber_plugin(), [](Context& context) {
    LibraryPlan large{.workspace_bytes = std::int64_t{8} << 20};
    LibraryPlan small{.workspace_bytes = 4096};
    std::optional<Workspace> workspace;
    CHECK_FALSE(take_workspace(context, large, "library", workspace));
    CHECK_FALSE(workspace.has_value());
    CHECK(large.why_not ==
          "there was no memory for its workspace of 8.00 MiB, and it is not tried again");
    large.workspace_bytes = 4096;  // memory would suffice now
    CHECK_FALSE(take_workspace(context, large, "library", workspace));
    CHECK_FALSE(workspace.has_value());

    REQUIRE(take_workspace(context, small, "library", workspace));
    CHECK(workspace->data() != nullptr);
    CHECK(context.ledger().usage(MemoryCategory::Workspace).current == 4096);
    CHECK(small.why_not.empty());
    workspace.reset();
    CHECK(context.ledger().usage(MemoryCategory::Workspace).current == 0);
  });
  REQUIRE(::unsetenv("TESSERA_FIBER_MEMORY") == 0);
}

TEST_CASE("a disabled plan allocates no memory") {
  const auto context = Context::create();
  LibraryPlan plan{.workspace_bytes = 4096, .why_not = "the dtype is f32"};
  std::optional<Workspace> workspace;
  CHECK_FALSE(take_workspace(*context, plan, "library", workspace));
  CHECK_FALSE(workspace.has_value());
  CHECK(plan.why_not == "the dtype is f32");
}

}  // namespace
}  // namespace tessera::test
