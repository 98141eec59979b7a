#include "kernels/cuda/library_plan.h"

#include <vector>

#include "core/base/memory.h"
#include "kernels/scratch.h"
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

/// Allows `bytes` for any number of sequences.
auto at_most(std::int64_t bytes) {
  return [=](std::int64_t wanted, std::int64_t) { return wanted <= bytes; };
}

TEST_CASE("a batch is halved until its workspace is allowed") {
  const auto context = Context::create();
  Plans plans;
  std::optional<Workspace> workspace;
  std::int64_t slice = 11;
  const auto take = [&](std::int64_t batch, std::int64_t most) {
    return take_sliced_workspace(*context, "library", batch, plans, at_most(most), slice,
                                 workspace);
  };
  CHECK(take(11, 4 * kMiB) == "");
  CHECK(slice == 3);
  CHECK(plans.asked == std::vector<std::int64_t>{11, 6, 5, 3, 2});  // slices, and rests
  CHECK(context->ledger().usage(MemoryCategory::Workspace).current == 3 * kMiB);
  workspace.reset();

  slice = 2;
  CHECK(take(2, kMiB / 2) == "its workspace would be 1.00 MiB");
  CHECK(slice == 1);
  CHECK_FALSE(workspace.has_value());
}

TEST_CASE("one sequence may take more than a slice") {
  constexpr std::int64_t kMore = kernels::cuda::kMostSlicedAttentionWorkspace + 1;
  CHECK(kernels::cuda::attention_workspace_fits(kMore, 1));
  CHECK_FALSE(kernels::cuda::attention_workspace_fits(kMore, 2));
}

TEST_CASE(
    "without memory a batch is halved, and without memory for a sequence the plan is disabled") {
  if (gpu_only()) return;
  REQUIRE(::setenv("TESSERA_FIBER_MEMORY", "6000000", 1) == 0);
  with_plugin(fiber_plugin(), [](Context& context) {
    Plans plans;
    std::optional<Workspace> workspace, second, third;
    std::int64_t slice = 16, one = 1;
    const auto take = [&](std::int64_t batch, std::int64_t& of, std::optional<Workspace>& into) {
      return take_sliced_workspace(context, "library", batch, plans, at_most(64 * kMiB), of, into);
    };
    CHECK(take(16, slice, workspace) == "");
    CHECK(slice == 4);
    CHECK(workspace->data() != nullptr);

    // The workspace above leaves 1.7 MB.
    CHECK(take(1, one, second) == "");
    const std::string never = "there was no memory for its workspace, and it is not tried again";
    CHECK(take(1, one, third) == never);
    workspace.reset();
    CHECK(take(1, one, third) == never);
    CHECK_FALSE(third.has_value());
  });
  REQUIRE(::unsetenv("TESSERA_FIBER_MEMORY") == 0);
}

TEST_CASE("a plan that can't run allocates no memory") {
  const auto context = Context::create();
  const LibraryPlan plan{.workspace_bytes = 4096, .why_not = "the dtype is f32"};
  std::optional<Workspace> workspace;
  std::int64_t slice = 1;
  const auto plan_of = [&](std::int64_t) -> const LibraryPlan& { return plan; };
  CHECK(take_sliced_workspace(*context, "library", 1, plan_of, at_most(kMiB), slice, workspace) ==
        "the dtype is f32");
  CHECK_FALSE(workspace.has_value());
}

}  // namespace
}  // namespace tessera::test
