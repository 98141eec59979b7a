#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "core/base/cpu_level.h"
#include "core/base/error.h"

namespace tessera {
namespace {

TEST_CASE("this build's supported levels are parsed by both names, others refused") {
  const auto levels = cpu_levels();
  for (const CpuLevel level : {CpuLevel::Generic, CpuLevel::V3, CpuLevel::V4}) {
    const std::string name(cpu_level_name(level));
    CAPTURE(name);
    const std::string last = level == CpuLevel::Generic ? name : name.substr(name.rfind('-') + 1);
    if (std::find(levels.begin(), levels.end(), level) != levels.end()) {
      CHECK(parse_cpu_level(name) == level);
      CHECK(parse_cpu_level(last) == level);
    } else {
      CHECK_THROWS_AS(parse_cpu_level(name), Unsupported);
      CHECK_THROWS_AS(parse_cpu_level(last), Unsupported);
    }
  }
  CHECK(detect_cpu_level() == levels.back());
}

TEST_CASE("a processor below this build's lowest level is refused with the missing features") {
  CHECK_THROWS_WITH_AS(detect_cpu_level({}), doctest::Contains("AVX2"), Unsupported);
}

TEST_CASE("an unknown level is refused with the list of known ones") {
  CHECK_THROWS_WITH_AS(parse_cpu_level("avx2"), doctest::Contains("generic, v3 or v4"),
                       InvalidArgument);
  CHECK_THROWS_AS(parse_cpu_level("v2"), InvalidArgument);
  CHECK_THROWS_AS(parse_cpu_level(""), InvalidArgument);
  CHECK_THROWS_AS(parse_cpu_level("x86-64-"), InvalidArgument);
}

}  // namespace
}  // namespace tessera
