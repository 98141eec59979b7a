#include "tools/tessera/plot/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace tessera::tools {
namespace {

// Labels of ticks that are `tick` apart and at most `most` in size.
std::string linear_label(double value, double tick, double most) {
  if (value == 0) return "0";
  if (most >= 1e4 && most < 1e15) {
    static constexpr std::array<std::pair<double, const char*>, 4> kUnits = {
        {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};
    const auto unit = *std::ranges::find_if(
        kUnits, [&](const auto& candidate) { return most >= candidate.first; });
    const int digits =
        std::max(0, static_cast<int>(std::ceil(-std::log10(tick / unit.first) - 1e-9)));
    return fmt::format("{:.{}f}{}", value / unit.first, digits, unit.second);
  }
  if (most >= 1e15 || most < 1e-2) {
    const double exponent = std::floor(std::log10(std::abs(value)) + 1e-9);
    return fmt::format("{:.5g}e{:.0f}", value / std::pow(10, exponent), exponent);
  }
  return fmt::format("{:.{}f}", value,
                     std::max(0, static_cast<int>(std::ceil(-std::log10(tick) - 1e-9))));
}

}  // namespace

Axis::Axis(double smallest, double largest, int most_ticks, Scale scale) : scale_(scale) {
  if (!(smallest <= largest)) {
    smallest = scale == Scale::Log ? 1 : 0;
    largest = scale == Scale::Log ? 10 : 1;
  }
  if (scale == Scale::Log)
    make_log(smallest, largest, most_ticks);
  else
    make_linear(smallest, largest, most_ticks);
}

void Axis::make_linear(double smallest, double largest, int most_ticks) {
  const bool whole = scale_ == Scale::Whole, exact = whole || scale_ == Scale::Exact;
  const double size = std::max(std::abs(smallest), std::abs(largest));
  if (largest - smallest < 1e-9 * size || largest == smallest) {
    // A constant: in the middle, or at the start of an exact axis.
    const double room = size == 0 ? 1 : exact ? std::max(1.0, 1e-6 * size) : 0.1 * size;
    if (!exact) smallest -= room;
    largest += room;
  }
  const double raw = (largest - smallest) / most_ticks;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double lead = raw / power;
  double tick = power * (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
  if (whole) tick = std::max(1.0, tick);
  low_ = exact ? smallest : std::floor(smallest / tick + 1e-9) * tick;
  high_ = exact ? largest : std::ceil(largest / tick - 1e-9) * tick;
  const double most = std::max(std::abs(low_), std::abs(high_));
  const double first = std::ceil(low_ / tick - 1e-9);
  const auto count = static_cast<int>(std::floor(high_ / tick + 1e-9) - first);
  for (int i = 0; i <= count; ++i) {
    const double value = (first + i) * tick;
    ticks_.push_back({value, linear_label(value, tick, most)});
  }
}

void Axis::make_log(double smallest, double largest, int most_ticks) {
  low_ = std::log10(smallest);
  high_ = std::log10(largest);
  const double room = std::max(0.04 * (high_ - low_), 0.02);
  low_ -= room;
  high_ += room;
  const double decades = high_ - low_;
  const int every = std::max(1, static_cast<int>(std::ceil(decades / most_ticks)));
  const bool between = decades * 3 <= most_ticks;  // also 2 and 5
  for (int exponent = static_cast<int>(std::floor(low_)); exponent <= high_; ++exponent) {
    if (exponent % every != 0) continue;
    for (const int factor : {1, 2, 5}) {
      if (factor > 1 && !between) continue;
      const double value = factor * std::pow(10.0, exponent);
      if (std::log10(value) < low_ || std::log10(value) > high_) continue;
      ticks_.push_back({value, std::abs(exponent) > 3 ? fmt::format("{}e{}", factor, exponent)
                                                      : fmt::format("{:g}", value)});
    }
  }
}

double Axis::position(double value) const {
  const double at = scale_ == Scale::Log ? std::log10(value) : value;
  return (at - low_) / (high_ - low_);
}

}  // namespace tessera::tools
