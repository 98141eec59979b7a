#include "tools/tessera/report/console.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <vector>

using namespace tessera::tools;

TEST_CASE("counts have at least three digits") {
  CHECK(format_count(0) == "0");
  CHECK(format_count(12) == "12");
  CHECK(format_count(5.5) == "5.5");
  CHECK(format_count(999) == "999");
  CHECK(format_count(1000) == "1.00k");
  CHECK(format_count(12345) == "12.3k");
  CHECK(format_count(999960) == "1.00M");
  CHECK(format_count(1.2e9) == "1.20G");
}

TEST_CASE("durations") {
  CHECK(tessera::format_duration(0.0123) == "12 ms");
  CHECK(tessera::format_duration(0.9999) == "1.0 s");
  CHECK(tessera::format_duration(12.34) == "12.3 s");
  CHECK(tessera::format_duration(100) == "1m 40s");
  CHECK(tessera::format_duration(3599.9) == "1h 00m");
  CHECK(tessera::format_duration(90000) == "1d 01h");
  CHECK(tessera::format_duration(std::nan("")) == "?");
  CHECK(tessera::format_duration(-1) == "?");
}

TEST_CASE("rows are aligned, and colored only on request") {
  CHECK(format_rows({}, {{"a", "1"}, {"long", "2"}, {"", "3"}}) ==
        "  a     1\n  long  2\n        3\n");
  CHECK(paint({}, Tone::Bad, "x") == "x");
  CHECK(paint({.live = true, .color = true, .width = 80}, Tone::Bad, "x") == "\x1b[31mx\x1b[0m");
}

TEST_CASE("a pipe is not a terminal") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  CHECK(!detect_console(ends[1]).live);
  CHECK(!detect_console(ends[1]).color);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_CASE("a sparkline follows its values and fits its width") {
  const std::vector<double> falling = {8, 7, 6, 5, 4, 3, 2, 1};
  CHECK(sparkline(falling, 8) == "█▇▆▅▄▃▂▁");
  CHECK(sparkline(falling, 4) == "█▆▃▁");
  CHECK(sparkline(std::vector<double>{1, 2}, 4) == "▁▁██");
  CHECK(sparkline(std::vector<double>{3, 3}, 2) == "▁▁");
  CHECK(sparkline(std::vector<double>{1, std::nan(""), 2}, 3) == "▁ █");
  CHECK(sparkline(std::vector<double>{std::nan("")}, 1) == " ");
  CHECK(sparkline({}, 8).empty());
}
