#include <doctest/doctest.h>

#include <string>

#include "core/base/cpu_level.h"
#include "core/base/error.h"

namespace tessera {
namespace {

TEST_CASE("levels up to this processor's are parsed by both names") {
  for (const CpuLevel level : {CpuLevel::Generic, CpuLevel::V2, CpuLevel::V3, CpuLevel::V4}) {
    const std::string name(cpu_level_name(level));
    CAPTURE(name);
    const std::string last = level == CpuLevel::Generic ? name : name.substr(name.rfind('-') + 1);
    if (level <= detect_cpu_level()) {
      CHECK(parse_cpu_level(name) == level);
      CHECK(parse_cpu_level(last) == level);
    } else {
      CHECK_THROWS_AS(parse_cpu_level(name), Unsupported);
      CHECK_THROWS_AS(parse_cpu_level(last), Unsupported);
    }
  }
}

TEST_CASE("an unknown level is refused with the known ones") {
  CHECK_THROWS_WITH_AS(parse_cpu_level("avx2"),
                       "unknown CPU level 'avx2'; use generic, v2, v3 or v4", InvalidArgument);
  CHECK_THROWS_AS(parse_cpu_level(""), InvalidArgument);
  CHECK_THROWS_AS(parse_cpu_level("x86-64-"), InvalidArgument);
}

}  // namespace
}  // namespace tessera
