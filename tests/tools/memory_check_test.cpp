#include "tools/tessera/train/memory_check.h"

#include <doctest/doctest.h>

#include "core/base/error.h"

using namespace tessera;
using namespace tessera::tools;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

MemoryNeed need_of(std::int64_t parameters, int ranks, SystemMemory memory) {
  MemoryNeed need;
  need.plan[static_cast<std::size_t>(MemoryCategory::Parameters)] = parameters;
  need.ranks = ranks;
  need.memory = memory;
  need.there = "this host has";
  return need;
}

std::string refusal(const MemoryNeed& need) {
  try {
    check_memory(need, true);
  } catch (const OutOfMemory& error) {
    return error.what();
  }
  return "nothing";
}

}  // namespace

TEST_CASE("a run that fits, and one of which nobody knows, start without a word") {
  CHECK(check_memory(need_of(10 * kMiB, 3, {40 * kMiB, 30 * kMiB}), true).empty());
  CHECK(check_memory(need_of(10 * kMiB, 3, {}), true).empty());
}

TEST_CASE("a run for which memory must become free first starts with a warning") {
  CHECK(
      check_memory(need_of(10 * kMiB, 4, {40 * kMiB, 39 * kMiB}), true) ==
      "the 4 ranks here need up to 40.0 MiB of memory, and this host has 40.0 MiB (39.0 MiB of it "
      "free now); a rank's share: parameters 10.0 MiB");
  CHECK(refusal(need_of(10 * kMiB, 4, {40 * kMiB, 39 * kMiB})) == "nothing");
}

TEST_CASE(
    "a run for which all memory is too little is refused, or warned of if that is asked for") {
  const MemoryNeed need = need_of(10 * kMiB, 1, {9 * kMiB, 9 * kMiB});
  const std::string text = refusal(need);
  CHECK(
      holds(text,
            "this run needs up to 10.0 MiB of memory, and this host has 9.00 MiB; a rank's share: "
            "parameters 10.0 MiB"));
  CHECK(holds(text, "Nothing was started"));
  CHECK(holds(text, "--train.memory_check warn"));
  CHECK(holds(check_memory(need, false), "this run needs up to 10.0 MiB"));
}
