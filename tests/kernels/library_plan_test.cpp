#include "kernels/cuda/library_plan.h"

#include <vector>

#include "core/base/memory.h"
#include "tests/kernels/kernel_support.h"
#include "tests/support/paths.h"

namespace tessera::test {
namespace {

using kernels::Workspace;
using kernels::cuda::LibraryPlan;
using kernels::cuda::take_sliced_workspace;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// Plans of 1 MiB for each sequence.
class Plans {
 public:
  const LibraryPlan& operator()(std::int64_t sequences) {
    asked.push_back(sequences);
    plan_ = {.workspace_bytes = sequences * kMiB};
    return plan_;
  }
  std::vector<std::int64_t> asked;

 private:
  LibraryPlan plan_;
};

TEST_CASE("a batch is halved until its workspace is within the limit") {
  const auto context = Context::create();
  Plans plans;
  std::optional<Workspace> workspace;
  std::int64_t slice = 11;
  CHECK(take_sliced_workspace(*context, "library", 11, 4 * kMiB, plans, slice, workspace) == "");
  CHECK(slice == 3);
  CHECK(plans.asked == std::vector<std::int64_t>{11, 6, 5, 3, 2});  // slices, and rests
  CHECK(context->ledger().usage(MemoryCategory::Workspace).current == 3 * kMiB);
  workspace.reset();

  slice = 2;
  CHECK(take_sliced_workspace(*context, "library", 2, kMiB / 2, plans, slice, workspace) ==
        "its workspace would be 1.00 MiB");
  CHECK_FALSE(workspace.has_value());
}

TEST_CASE("without memory a batch is halved, and a later call may have the memory") {
  if (gpu_only()) return;
  REQUIRE(::setenv("TESSERA_FIBER_MEMORY", "6000000", 1) == 0);
  with_plugin(fiber_plugin(), [](Context& context) {
    Plans plans;
    std::optional<Workspace> workspace;
    std::int64_t slice = 16;
    CHECK(take_sliced_workspace(context, "library", 16, 64 * kMiB, plans, slice, workspace) == "");
    CHECK(slice == 4);
    CHECK(workspace->data() != nullptr);

    // The workspace above leaves 1.7 MB.
    std::optional<Workspace> second, third;
    std::int64_t one = 1;
    CHECK(take_sliced_workspace(context, "library", 1, 64 * kMiB, plans, one, second) == "");
    CHECK(take_sliced_workspace(context, "library", 1, 64 * kMiB, plans, one, third) ==
          "there was no memory for its workspace of 1.00 MiB");
    CHECK_FALSE(third.has_value());
    workspace.reset();
    CHECK(take_sliced_workspace(context, "library", 1, 64 * kMiB, plans, one, third) == "");
  });
  REQUIRE(::unsetenv("TESSERA_FIBER_MEMORY") == 0);
}

TEST_CASE("a plan that can't run allocates no memory") {
  const auto context = Context::create();
  const LibraryPlan plan{.workspace_bytes = 4096, .why_not = "the dtype is f32"};
  std::optional<Workspace> workspace;
  std::int64_t slice = 1;
  const auto plan_of = [&](std::int64_t) -> const LibraryPlan& { return plan; };
  CHECK(take_sliced_workspace(*context, "library", 1, kMiB, plan_of, slice, workspace) ==
        "the dtype is f32");
  CHECK_FALSE(workspace.has_value());
}

}  // namespace
}  // namespace tessera::test
