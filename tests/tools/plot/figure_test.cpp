#include "tools/tessera/plot/figure.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/support/text.h"

using namespace tessera::tools;
using tessera::test::count;
using tessera::test::holds;

namespace {

std::string svg_of(const std::vector<Point>& points, Scale scale = Scale::Linear) {
  return draw({.title = "t",
               .legend = {},
               .x_title = "step",
               .panels = {{.title = "p",
                           .scale = scale,
                           .legend = {},
                           .curves = {{.name = "c", .points = points}}}}})
      .svg;
}

}  // namespace

TEST_CASE("a gap splits the line, and a point between gaps is a dot") {
  const double nan = std::nan("");
  const std::string svg = svg_of({{0, 1}, {1, 2}, {2, nan}, {3, 4}, {4, nan}, {5, 1}, {6, 2}});
  const auto line = svg.substr(svg.find("class=\"curve"));
  CHECK(count(line.substr(0, line.find("/>")), "M") == 3);
  CHECK(count(svg, "<circle") == 1);
  CHECK(count(svg_of({{7, 1}}), "<circle") == 1);
  CHECK(count(svg_of({{7, nan}}), "class=\"curve") == 0);
}

TEST_CASE("long curves keep their extremes in a small picture") {
  std::vector<Point> points;
  for (int i = 0; i < 200'000; ++i)
    points.push_back({static_cast<double>(i), i == 77'777 ? 9.0 : 1.0 + i % 3});
  const std::string svg = svg_of(points);
  CHECK(svg.size() < 30'000);
  CHECK(holds(svg, ">10</text>"));  // above the spike
}

TEST_CASE("extreme values give a picture without nan or inf") {
  const std::vector<std::vector<Point>> curves = {
      {},
      {{0, 3}},
      {{0, 3}, {1, 3}},
      {{5, std::nan("")}},
      {{0, HUGE_VAL}, {10, 2}},
      {{0, 1e30}, {1, 1e-30}},
      {{0, 1e-300}, {1, 1e300}},
      {{1e15, 1}, {1e15 + 1, 2}},
  };
  for (const auto& points : curves)
    for (const Scale scale : {Scale::Linear, Scale::Log}) {
      const std::string svg = svg_of(points, scale);
      CAPTURE(svg);
      CHECK(svg.starts_with("<svg xmlns="));
      CHECK(svg.ends_with("</svg>\n"));
      const std::string drawn = svg.substr(svg.find("</style>"));
      CHECK_FALSE(holds(drawn, "nan"));
      CHECK_FALSE(holds(drawn, "inf"));
    }
}

TEST_CASE("names are escaped, and shortened from the left at character boundaries") {
  const auto titled = [](const std::string& title) {
    return draw({.title = title,
                 .legend = {},
                 .x_title = "",
                 .panels = {{.title = "p", .legend = {}, .curves = {}}}})
        .svg;
  };
  CHECK(holds(titled("a<b>&c"), ">a&lt;b&gt;&amp;c</text>"));
  CHECK(holds(titled("a\" onload=\"b"), "aria-label=\"a&quot; onload=&quot;b\">"));
  CHECK(holds(titled("a\x01\xff"), ">a\\x01\\xff</text>"));
  std::string longer;
  for (int i = 0; i < 50; ++i) longer += "\u00e9";
  CHECK(holds(titled(longer + "/end"), "\u2026\u00e9"));
}

TEST_CASE("an odd number of panels begins with a wide one, and the legend wraps") {
  Figure figure{.title = {}, .legend = {}, .x_title = "step", .panels = {}};
  for (int i = 0; i < 5; ++i) figure.panels.push_back({.title = "p", .legend = {}, .curves = {}});
  const Drawing five = draw(figure);
  figure.panels.pop_back();
  const Drawing four = draw(figure);
  CHECK(five.width == four.width);
  CHECK(five.height > 1.5 * four.height);
  for (std::size_t i = 0; i < kCurveStyles; ++i)
    figure.legend.push_back({.text = "experiments/long-name-of-a-run", .style = i});
  CHECK(draw(figure).height > four.height + 100);
  CHECK(count(draw(figure).svg, "experiments/long-name-of-a-run") == kCurveStyles);
}
