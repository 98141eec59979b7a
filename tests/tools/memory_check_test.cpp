#include "tools/tessera/train/memory_check.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::tools;

TEST_CASE("a run is refused if total memory is too small, and warned if free memory is") {
  constexpr std::int64_t kMiB = 1 << 20;
  MemoryNeed need;
  need.plan[static_cast<std::size_t>(MemoryCategory::Parameters)] = 10 * kMiB;
  need.ranks = 4;
  need.there = "this host has";
  CHECK(check_memory(need, true).empty());  // unknown memory size
  need.memory = {50 * kMiB, 40 * kMiB};
  CHECK(check_memory(need, true).empty());
  need.memory = {40 * kMiB, 39 * kMiB};
  CHECK(
      check_memory(need, true) ==
      "the 4 ranks here need up to 40.0 MiB of memory, and this host has 40.0 MiB (39.0 MiB of it "
      "free now); a rank's share: parameters 10.0 MiB");
  need.memory = {39 * kMiB, 39 * kMiB};
  CHECK_THROWS_HOLDING(OutOfMemory, "and this host has 39.0 MiB; a rank's share: parameters",
                       check_memory(need, true));
  CHECK_THROWS_HOLDING(OutOfMemory, "--train.memory_check warn", check_memory(need, true));
  CHECK(check_memory(need, false).find("need up to 40.0 MiB") != std::string::npos);
}
