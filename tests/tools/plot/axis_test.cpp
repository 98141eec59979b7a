#include "tools/tessera/plot/axis.h"

#include <doctest/doctest.h>

#include <string>

using namespace tessera::tools;

namespace {

// "0 5 10"
std::string labels(const Axis& axis) {
  std::string text;
  for (const Tick& tick : axis.ticks()) text += (text.empty() ? "" : " ") + tick.label;
  return text;
}

}  // namespace

TEST_CASE("linear axes have round ticks, also at their ends") {
  const Axis loss(1.83, 5.54, 7, Scale::Linear);
  CHECK(labels(loss) == "1 2 3 4 5 6");
  CHECK(loss.position(1) == 0);
  CHECK(loss.position(6) == 1);
  CHECK(labels({5.374, 5.543, 5, Scale::Linear}) == "5.35 5.40 5.45 5.50 5.55");
  CHECK(labels({0, 3e-3, 5, Scale::Linear}) == "0 1e-3 2e-3 3e-3");
  CHECK(labels({0, 1.2e-4, 3, Scale::Linear}) == "0 5e-5 1e-4 1.5e-4");
  CHECK(labels({0, 1e-3, 5, Scale::Linear}) == "0 2e-4 4e-4 6e-4 8e-4 1e-3");
  CHECK(labels({0, 74800, 4, Scale::Linear}) == "0 20k 40k 60k 80k");
  CHECK(labels({-2, 2, 4, Scale::Linear}) == "-2 -1 0 1 2");
}

TEST_CASE("exact axes end at the data, and whole ones have ticks at whole numbers") {
  const Axis time(0, 27.1, 8, Scale::Exact);
  CHECK(labels(time) == "0 5 10 15 20 25");
  CHECK(time.position(27.1) == 1);
  CHECK(labels({0, 3, 8, Scale::Whole}) == "0 1 2 3");
  CHECK(labels({0, 3, 8, Scale::Exact}) == "0 0.5 1.0 1.5 2.0 2.5 3.0");
  CHECK(labels({5100, 6000, 5, Scale::Whole}) == "5200 5400 5600 5800 6000");
  CHECK(labels({0, 2.5e9, 6, Scale::Whole}) == "0 0.5G 1.0G 1.5G 2.0G 2.5G");
}

TEST_CASE("logarithmic axes have a tick per power of ten, or more or fewer if there is room") {
  CHECK(labels({0.4, 90, 8, Scale::Log}) == "0.5 1 2 5 10 20 50 100");
  CHECK(labels({0.02, 3000, 6, Scale::Log}) == "0.1 1 10 100 1000");
  CHECK(labels({1e-12, 1e12, 6, Scale::Log}) == "1e-10 1e-5 1 1e5 1e10");
  const Axis axis(1, 100, 5, Scale::Log);
  CHECK(axis.position(10) == doctest::Approx(0.5));
}

TEST_CASE("without a range there are still two ticks") {
  for (const Scale scale : {Scale::Linear, Scale::Log, Scale::Exact, Scale::Whole}) {
    CHECK(Axis(1, 0, 5, scale).ticks().size() >= 2);
    CHECK(Axis(1, 0, 5, scale).position(1) <= 1);
  }
  CHECK(labels({3, 3, 4, Scale::Linear}) == "2.6 2.8 3.0 3.2 3.4");
  CHECK(labels({0, 0, 4, Scale::Whole}) == "0 1");
  const double huge = 9e18;  // plus 1 is the same
  CHECK(Axis(huge, huge, 4, Scale::Whole).position(huge) == 0);
}
