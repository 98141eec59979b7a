#include "tools/tessera/report/loss_svg.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/support/text.h"

using namespace tessera::tools;
using tessera::test::count;
using tessera::test::holds;

TEST_CASE("the plot contains both curves, a legend with the last values, and round ticks") {
  std::vector<tessera::train::LossPoint> train;
  for (int i = 0; i < 2000; ++i) train.push_back({i, 1.5 + 2.5 * std::exp(-i / 200.0)});
  const std::vector<tessera::train::LossPoint> val = {{0, 4.1}, {1000, 1.7}, {2000, 1.612}};
  const std::string svg = loss_svg("runs/a", train, val);
  CHECK(svg.starts_with("<svg xmlns="));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK(holds(svg, "training 1.500"));
  CHECK(holds(svg, "validation 1.612"));
  CHECK(count(svg, "<circle") == 3);
  CHECK(holds(svg, ">2000</text>"));
  CHECK(holds(svg, ">4.5</text>"));
  CHECK(svg.size() < 30000);  // decimated
}

TEST_CASE("extreme data give a plot without nan or inf") {
  const std::vector<std::vector<tessera::train::LossPoint>> curves = {{},
                                                                      {{0, 3.0}},
                                                                      {{0, 3.0}, {1, 3.0}},
                                                                      {{5, std::nan("")}},
                                                                      {{0, HUGE_VAL}, {10, 2.0}},
                                                                      {{0, 1e30}, {1, 1e-30}},
                                                                      {{0, -5.0}, {1000000, 5.0}}};
  for (const auto& train : curves) {
    for (const auto& val : curves) {
      const std::string svg = loss_svg("t", train, val);
      CHECK(!holds(svg, "nan"));
      CHECK(!holds(svg, "inf"));
      CHECK(svg.size() < 30000);
    }
  }
}

TEST_CASE("titles are escaped, and shortened from the left at character boundaries") {
  CHECK(holds(loss_svg("a<b>&c", {}, {}), ">a&lt;b&gt;&amp;c</text>"));
  CHECK(holds(loss_svg("a\" onload=\"b", {}, {}), "aria-label=\"a&quot; onload=&quot;b\">"));
  std::string longer;
  for (int i = 0; i < 30; ++i) longer += "\u00e9";
  CHECK(holds(loss_svg(longer + "/end", {}, {}), "\u2026\u00e9"));
}
