#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::tools {

/// Linear: the axis ends at ticks. Exact: it ends at the data. Whole: the same, with ticks at whole numbers alone.
enum class Scale : std::uint8_t { Linear, Log, Exact, Whole };

struct Tick {
  double value = 0;
  std::string label;
};

/// Range of a plot's axis with labelled ticks: at 1, 2 or 5 times a power of ten, or, on a logarithmic
/// scale of many decades, at powers of ten.
class Axis {
 public:
  /// @param smallest, largest  of the data, > 0 for Scale::Log; smallest > largest: there is none
  /// @param most_ticks         at least 2
  Axis(double smallest, double largest, int most_ticks, Scale scale);

  /// 0 at the low end of the axis, 1 at the high end. @param value  > 0 for Scale::Log
  double position(double value) const;
  const std::vector<Tick>& ticks() const { return ticks_; }

 private:
  void make_linear(double smallest, double largest, int most_ticks);
  void make_log(double smallest, double largest, int most_ticks);

  Scale scale_;
  double low_ = 0, high_ = 1;  // logarithms on a logarithmic scale
  std::vector<Tick> ticks_;
};

}  // namespace tessera::tools
