#include "tools/tessera/plot/panels.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::tools;

namespace {

RunMetrics run_of(const std::string& name, int steps) {
  RunMetrics run;
  run.name = name;
  for (int i = 0; i < steps; ++i) {
    run.rows.push_back({.step = i, .tokens = 100.0 * i, .seconds = 60.0 * i});
    if (i % 100 == 0) run.add("val_loss", 3.0 - i * 1e-4);
    run.add("loss", 4.0 - i * 1e-4);
    run.add("grad_norm", i == 3 ? 1000.0 : 1.0);
    run.add("memory_bytes", 3.0 * (1 << 30));
    run.add("step_ms", 5);
    run.add("time", 1.7e9);
  }
  return run;
}

std::vector<std::string> titles(const Figure& figure) {
  std::vector<std::string> all;
  for (const Panel& panel : figure.panels) all.push_back(panel.title);
  return all;
}

}  // namespace

TEST_CASE("a panel per metric that there is; validation is in the loss's") {
  const std::vector runs = {run_of("a", 300), run_of("b", 20)};
  const Figure figure = make_figure(runs, {});
  CHECK(titles(figure) == std::vector<std::string>{"loss (nats per token)", "gradient norm",
                                                   "peak memory of rank 0 (GiB)"});
  CHECK(figure.legend.size() == 2);
  const Panel& loss = figure.panels[0];
  REQUIRE(loss.curves.size() ==
          5);  // a: each step and mean; b: few, so not smoothed; validation of both
  CHECK(loss.curves[0].line == LineStyle::Faint);
  CHECK(loss.curves[1].name == "a: mean of 6");
  CHECK(loss.curves[2].points.size() == 20);
  CHECK(loss.curves[3].line == LineStyle::Marked);
  CHECK(loss.curves[4].style == loss.curves[2].style);
  CHECK(loss.legend.size() == 3);
  CHECK(loss.scale == Scale::Linear);
  CHECK(figure.panels[1].scale == Scale::Log);  // 1 to 1000
  CHECK(figure.panels[2].curves[0].points[0].y == 3);
}

TEST_CASE("keys, axis and smoothing can be chosen") {
  const std::vector runs = {run_of("a", 300)};
  const Figure chosen = make_figure(runs, {.keys = {"step_ms", "val_loss"}, .x = PlotAxis::Tokens});
  CHECK(titles(chosen) ==
        std::vector<std::string>{"step time (ms)", "validation loss (nats per token)"});
  CHECK(chosen.title == "a");
  CHECK(chosen.legend.empty());
  CHECK(chosen.panels[1].curves[0].points[1].x == 10'000);
  const Figure timed = make_figure(runs, {.keys = {"loss"}, .x = PlotAxis::Time, .smooth = 0});
  CHECK(timed.x_title == "time of training (hours)");
  REQUIRE(timed.panels[0].curves.size() == 1);
  CHECK(timed.panels[0].curves[0].points[5].x == doctest::Approx(5.0 / 60));

  CHECK_THROWS_HOLDING(InvalidArgument, "no run has the metric 'los'; there are grad_norm, loss",
                       make_figure(runs, {.keys = {"los"}}));
  const std::vector many(kCurveStyles + 1, run_of("a", 2));
  CHECK_THROWS_HOLDING(InvalidArgument, "plot at most 21", make_figure(many, {}));
}

TEST_CASE("smoothing keeps the first value, averages around the others, and forgets a spike") {
  std::vector<Point> points;
  for (int i = 0; i < 1000; ++i) points.push_back({static_cast<double>(i), i % 2 == 0 ? 1.0 : 3.0});
  points[100].y = 1e30;
  points[200].y = std::nan("");
  const std::vector<Point> means = smoothed(points, 20);
  CHECK(means.front().y == 1);
  CHECK(means.back().x == 999);
  CHECK(means.back().y == doctest::Approx(2).epsilon(0.1));
  for (const Point& mean : means) {
    if (mean.x == 200) CHECK(std::isnan(mean.y));
    if (mean.x == 150 || mean.x == 500) CHECK(mean.y == doctest::Approx(2).epsilon(0.1));
  }
  CHECK(means.size() < points.size());
}
