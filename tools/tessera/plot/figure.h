#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/tessera/plot/axis.h"

namespace tessera::tools {

struct Point {
  double x = 0;
  double y = 0;  ///< not finite: a gap
};

/// Faint: raw values behind a smoothed curve. Marked: thicker, with a dot at each of a few points.
enum class LineStyle : std::uint8_t { Plain, Faint, Marked };

struct Curve {
  std::string name;       ///< shown when the pointer rests on it
  std::size_t style = 0;  ///< number of a color and dash pattern, below kCurveStyles
  LineStyle line = LineStyle::Plain;
  std::vector<Point> points;  ///< by x, ascending; y > 0 on a logarithmic scale
};

/// An entry of a legend.
struct LegendEntry {
  std::string text;
  std::size_t style = 0;
  LineStyle line = LineStyle::Plain;
  bool neutral = false;  ///< in the color of text: stands for all runs
};

struct Panel {
  std::string title;
  Scale scale = Scale::Linear;
  bool from_zero = false;           ///< the axis begins at 0
  std::vector<LegendEntry> legend;  ///< beside the title
  std::vector<Curve> curves;
};

struct Figure {
  std::string title;                ///< may be empty
  std::vector<LegendEntry> legend;  ///< below the title
  std::string x_title;
  Scale x_scale = Scale::Whole;
  std::vector<Panel> panels;
};

/// Seven colors that color-blind people can tell apart, each solid, dashed and dotted.
inline constexpr std::size_t kCurveStyles = 21;

struct Drawing {
  std::string svg;  ///< for light and dark pages, without references to other files
  int width = 0, height = 0;
};

/// Draws panels in a grid. Long curves are reduced to the lowest and highest value of each pixel or two.
Drawing draw(const Figure& figure);

}  // namespace tessera::tools
