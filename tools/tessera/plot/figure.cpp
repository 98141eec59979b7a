#include "tools/tessera/plot/figure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

// Pixels. A panel's title and legend stand above its axes, tick labels left of and below them.
constexpr double kEdge = 20, kGap = 24;
constexpr double kLeft = 58, kRight = 12, kTop = 40, kBottom = 48;
constexpr double kWidth = 1180, kSingleWidth = 760, kHeight = 290, kLargeHeight = 360;
constexpr double kLegendLine = 22, kSwatch = 26, kSpace = 20;
constexpr double kCharacter = 7.2;  // widest usual font of 13 pixels, on average
constexpr std::size_t kLongestName = 60;

// Okabe and Ito 2008, "Color universal design", without yellow; black is last.
// Avoids CSS custom properties, which many viewers lack.
constexpr const char* kStyle = R"(<style>
  svg { font-family: "DejaVu Sans", system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px }
  text { fill: #4f5b6a } .title { fill: #1f2933; font-weight: 600 } .large { font-size: 16px }
  .page { fill: #ffffff } .grid { stroke: #e3e7ec } .axis { stroke: #8a95a3 }
  .curve, .key { fill: none; stroke-width: 1.6; stroke-linejoin: round }
  .faint { stroke-opacity: 0.28; stroke-width: 1 } .marked { stroke-width: 2.2 }
  .dot { fill: #ffffff; stroke-width: 1.8 } .neutral { stroke: #4f5b6a }
  .c0 { stroke: #0072b2 } .c1 { stroke: #d55e00 } .c2 { stroke: #009e73 } .c3 { stroke: #cc79a7 }
  .c4 { stroke: #e69f00 } .c5 { stroke: #56b4e9 } .c6 { stroke: #1f2933 }
  .d1 { stroke-dasharray: 7 3 } .d2 { stroke-dasharray: 2 2.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #a3adbb } .title { fill: #e6eaf0 } .page, .dot { fill: #161b22 }
    .grid { stroke: #2c343f } .axis { stroke: #6b7785 } .neutral { stroke: #a3adbb }
    .c0 { stroke: #3d9fe0 } .c6 { stroke: #e6eaf0 }
  }
</style>
)";

std::string in_xml(std::string_view text) {
  std::string out;
  for (const char c : escaped(text)) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Keeps the end, where paths differ.
std::string shortened(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  std::size_t begin = text.size() - most;
  while (begin < text.size() && continues_character(text[begin])) ++begin;
  return "\u2026" + text.substr(begin);
}

double width_of(std::string_view text) {
  return kCharacter *
         static_cast<double>(text.size() - static_cast<std::size_t>(
                                               std::ranges::count_if(text, continues_character)));
}

// First, lowest, highest and last point of each of `buckets` equal parts of the axis, and the gaps.
std::vector<Point> reduced(const std::vector<Point>& points, std::size_t buckets) {
  if (points.size() <= 4 * buckets) return points;
  const double begin = points.front().x;
  const double per_x = static_cast<double>(buckets) / std::max(points.back().x - begin, 1e-300);
  const auto bucket = [&](std::size_t i) { return std::floor((points[i].x - begin) * per_x); };
  std::vector<Point> out;
  for (std::size_t i = 0; i < points.size();) {
    std::size_t low = i, high = i, last = i, gap = points.size();
    for (; last < points.size() && bucket(last) == bucket(i); ++last) {
      if (!std::isfinite(points[last].y)) {
        gap = last;
        continue;
      }
      if (!(points[low].y <= points[last].y)) low = last;
      if (!(points[high].y >= points[last].y)) high = last;
    }
    std::vector<std::size_t> kept = {i, low, high, last - 1};
    if (gap < points.size()) kept.push_back(gap);
    std::ranges::sort(kept);
    kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
    for (const std::size_t k : kept) out.push_back(points[k]);
    i = last;
  }
  return out;
}

// Classes of a curve's style.
std::string classes(std::size_t style, LineStyle line) {
  std::string text = fmt::format("c{}", style % 7);
  if (line == LineStyle::Faint) return text + " faint";
  if (line == LineStyle::Marked) text += " marked";
  if (style >= 7) text += fmt::format(" d{}", style / 7 % 3);
  return text;
}

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

// Area of a panel's axes.
struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};

class Artist {
 public:
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(svg_), format, std::forward<Args>(args)...);
  }
  void text(double x, double y, const char* attributes, std::string_view content) {
    add("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, attributes, in_xml(content));
  }
  void legend_entry(double x, double y, const LegendEntry& entry) {
    std::string style = classes(entry.style, entry.line);
    if (entry.neutral) style.replace(0, 2, "neutral");
    add("<path class=\"key {}\" d=\"M{:.1f} {:.1f}h{:.0f}\"/>", style, x, y, kSwatch);
    if (entry.line == LineStyle::Marked)
      add("<circle class=\"dot {}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>",
          entry.neutral ? "neutral" : fmt::format("c{}", entry.style % 7), x + kSwatch / 2, y);
    text(x + kSwatch + 6, y + 4.5, "", shortened(entry.text, kLongestName));
  }
  static double legend_width(const LegendEntry& entry) {
    return kSwatch + 6 + width_of(shortened(entry.text, kLongestName)) + kSpace;
  }

  void panel(const Panel& panel, const Box& box, const Range& x_range, const Figure& figure) {
    const auto buckets = static_cast<std::size_t>(box.width / 2);
    std::vector<std::vector<Point>> curves;
    Range y_range;
    if (panel.from_zero) y_range.add(0);
    for (const Curve& curve : panel.curves) {
      for (const Point& point : curves.emplace_back(reduced(curve.points, buckets)))
        if (std::isfinite(point.y)) y_range.add(point.y);
    }
    const Axis x(x_range.low, x_range.high, static_cast<int>(box.width / 75), figure.x_scale);
    const Axis y(y_range.low, y_range.high, static_cast<int>(box.height / 38), panel.scale);
    const auto px = [&](double value) { return box.x + x.position(value) * box.width; };
    const auto py = [&](double value) { return box.y + (1 - y.position(value)) * box.height; };

    std::string title = panel.title;
    if (panel.scale == Scale::Log) title += ", log scale";
    text(box.x, box.y - 16, "class=\"title\"", title);
    double at = box.x + box.width + kSpace;
    for (const LegendEntry& entry : panel.legend) at -= legend_width(entry);
    for (const LegendEntry& entry : panel.legend) {
      legend_entry(at, box.y - 20.5, entry);
      at += legend_width(entry);
    }
    for (const Tick& tick : y.ticks()) {
      add("<path class=\"grid\" d=\"M{:.1f} {:.1f}h{:.1f}\"/>", box.x, py(tick.value), box.width);
      text(box.x - 8, py(tick.value) + 4.5, "text-anchor=\"end\"", tick.label);
    }
    const double bottom = box.y + box.height;
    for (const Tick& tick : x.ticks()) {
      add("<path class=\"axis\" d=\"M{:.1f} {:.1f}v5\"/>", px(tick.value), bottom);
      text(px(tick.value), bottom + 19, "text-anchor=\"middle\"", tick.label);
    }
    add("<path class=\"axis\" d=\"M{:.1f} {:.1f}h{:.1f}\"/>\n", box.x, bottom, box.width);
    text(box.x + box.width / 2, bottom + 38, "text-anchor=\"middle\"", figure.x_title);
    // Raw values lie behind all smoothed ones.
    for (const bool faint : {true, false})
      for (std::size_t i = 0; i < curves.size(); ++i)
        if ((panel.curves[i].line == LineStyle::Faint) == faint)
          curve(panel.curves[i], curves[i], px, py);
  }

  std::string take() { return std::move(svg_); }

 private:
  template <typename X, typename Y>
  void curve(const Curve& curve, const std::vector<Point>& points, const X& px, const Y& py) {
    constexpr std::size_t kMostDots = 40;  // more would hide the line
    std::string path;
    std::vector<const Point*> dots;
    bool begins = true;
    for (std::size_t i = 0; i < points.size(); ++i) {
      const Point& point = points[i];
      const bool is_gap = !std::isfinite(point.y);
      const bool ends = i + 1 == points.size() || !std::isfinite(points[i + 1].y);
      if (!is_gap)
        path += fmt::format("{}{:.1f} {:.1f}", begins ? 'M' : 'L', px(point.x), py(point.y));
      // A point between gaps has no line.
      if (!is_gap && (curve.line == LineStyle::Marked || (begins && ends))) dots.push_back(&point);
      begins = is_gap;
    }
    if (path.empty()) return;
    add("<path class=\"curve {}\" d=\"{}\"><title>{}</title></path>\n",
        classes(curve.style, curve.line), path, in_xml(curve.name));
    if (curve.line == LineStyle::Marked && points.size() > kMostDots) return;
    for (const Point* dot : dots)
      add("<circle class=\"dot c{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>\n", curve.style % 7,
          px(dot->x), py(dot->y));
  }

  std::string svg_;
};

}  // namespace

Drawing draw(const Figure& figure) {
  const bool single = figure.panels.size() == 1;
  const double width = single ? kSingleWidth : kWidth;
  Range x_range;
  for (const Panel& panel : figure.panels)
    for (const Curve& curve : panel.curves)
      for (const Point& point : curve.points) x_range.add(point.x);
  if (x_range.low <= x_range.high && x_range.low < 0.2 * x_range.high) x_range.add(0);

  Artist artist;
  double top = 8;
  if (!figure.title.empty()) {
    artist.text(kEdge + kLeft, top + 24, "class=\"title large\"", shortened(figure.title, 70));
    top += 34;
  }
  double column = 0;
  for (const LegendEntry& entry : figure.legend)
    column = std::max(column, Artist::legend_width(entry));
  double x = kEdge + kLeft;
  for (const LegendEntry& entry : figure.legend) {
    if (x > kEdge + kLeft && x + column > width - kEdge + kSpace) {
      x = kEdge + kLeft;
      top += kLegendLine;
    }
    artist.legend_entry(x, top + 16, entry);
    x += column;
  }
  if (!figure.legend.empty()) top += kLegendLine + 8;

  // An odd number of panels begins with a wide one.
  for (std::size_t i = 0; i < figure.panels.size(); ++i) {
    const bool wide = i == 0 && figure.panels.size() % 2 == 1;
    const bool right = !wide && i % 2 == (figure.panels.size() % 2 == 1 ? 0 : 1);
    const double cell = wide ? width - 2 * kEdge : (width - 2 * kEdge - kGap) / 2;
    const double height = wide ? kLargeHeight : kHeight;
    const double left = right ? kEdge + cell + kGap : kEdge;
    artist.panel(figure.panels[i],
                 {left + kLeft, top + kTop, cell - kLeft - kRight, height - kTop - kBottom},
                 x_range, figure);
    if (wide || right) top += height + 8;
  }

  Drawing drawing{
      .svg = {}, .width = static_cast<int>(width), .height = static_cast<int>(top + 12)};
  drawing.svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" "
      "role=\"img\" aria-label=\"{2}\">\n{3}<rect class=\"page\" width=\"{0}\" height=\"{1}\" "
      "rx=\"8\"/>\n{4}</svg>\n",
      drawing.width, drawing.height, in_xml(figure.title.empty() ? "metrics" : figure.title),
      kStyle, artist.take());
  return drawing;
}

}  // namespace tessera::tools
