#include "tools/tessera/report/loss_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string_view>

namespace tessera::tools {
namespace {

constexpr double kWidth = 760, kHeight = 420;
constexpr double kLeft = 64, kRight = 24, kTop = 52, kBottom = 52;

struct Point {
  double x, y;
};

/// Drops non-finite points and averages the rest into at most `limit` points.
std::vector<Point> thin(const std::vector<train::LossPoint>& points, std::size_t limit) {
  std::vector<Point> finite;
  for (const train::LossPoint& p : points) {
    if (std::isfinite(p.loss)) finite.push_back({static_cast<double>(p.step), p.loss});
  }
  if (finite.size() <= limit) return finite;
  std::vector<Point> out(limit);
  for (std::size_t i = 0; i < limit; ++i) {
    const std::size_t begin = i * finite.size() / limit;
    const std::size_t end = (i + 1) * finite.size() / limit;
    Point sum{0, 0};
    for (std::size_t k = begin; k < end; ++k) sum = {sum.x + finite[k].x, sum.y + finite[k].y};
    const auto count = static_cast<double>(end - begin);
    out[i] = {sum.x / count, sum.y / count};
  }
  return out;
}

/// Axis with ticks at 1, 2 or 5 times a power of ten.
struct Axis {
  double low = 0, high = 1, tick = 1;

  Axis(double smallest, double largest, int wanted_ticks, bool whole) {
    if (!(smallest <= largest)) smallest = 0, largest = 1;  // no data
    if (largest - smallest < 1e-9 * std::max(1.0, std::abs(largest))) largest = smallest + 1;
    const double raw = (largest - smallest) / wanted_ticks;
    const double power = std::pow(10, std::floor(std::log10(raw)));
    const double lead = raw / power;
    tick = power * (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
    if (whole) tick = std::max(1.0, tick);
    low = std::floor(smallest / tick) * tick;
    high = whole ? largest : std::ceil(largest / tick) * tick;
  }
  std::vector<double> ticks() const {
    std::vector<double> values;
    const auto last = static_cast<int>(std::floor((high - low) / tick + 1e-9));
    for (int i = 0; i <= last; ++i) values.push_back(low + i * tick);
    return values;
  }
  std::string label(double value) const {
    if (value == 0) return "0";
    if (tick >= 1000 && std::fmod(tick, 100) == 0) {
      return value >= 1e6 ? fmt::format("{:g}M", value / 1e6) : fmt::format("{:g}k", value / 1e3);
    }
    const int digits = std::max(0, static_cast<int>(std::ceil(-std::log10(tick) - 1e-9)));
    return fmt::format("{:.{}f}", value, digits);
  }
};

std::string escape(const std::string& text) {
  // Escapes quotes, too, because the title is also used as an attribute.
  static const std::map<char, std::string_view> kEntities = {
      {'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}};
  std::string out;
  for (const char c : text) {
    if (const auto entity = kEntities.find(c); entity != kEntities.end())
      out += entity->second;
    else  // control characters are not allowed in XML, not even escaped
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out;
}

/// Keeps the end of a long title, where paths differ, to leave room for the legend.
std::string shorten(const std::string& title) {
  constexpr std::size_t kMost = 38;
  if (title.size() <= kMost) return title;
  std::size_t begin = title.size() - kMost;
  while (begin < title.size() && (static_cast<unsigned char>(title[begin]) & 0xC0) == 0x80) ++begin;
  return "\u2026" + title.substr(begin);
}

struct Plot {
  Axis x, y;
  double px(double v) const {
    return kLeft + (v - x.low) / (x.high - x.low) * (kWidth - kLeft - kRight);
  }
  double py(double v) const {
    return kHeight - kBottom - (v - y.low) / (y.high - y.low) * (kHeight - kTop - kBottom);
  }
  std::string path(const std::vector<Point>& points) const {
    std::string d;
    for (const Point& p : points) {
      d += fmt::format("{}{:.1f} {:.1f}", d.empty() ? "M" : "L", px(p.x), py(p.y));
    }
    return d;
  }
};

// Avoids CSS custom properties, which many viewers lack.
constexpr const char* kStyle = R"(<style>
  svg { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px }
  text { fill: #5f6b7a } .title { fill: #1f2933; font-size: 16px; font-weight: 600 }
  .value { fill: #1f2933; font-variant-numeric: tabular-nums }
  .page { fill: #ffffff } .grid { stroke: #e3e7ec } .axis { stroke: #8a95a3 }
  .train { stroke: #2f6fd0; fill: none; stroke-width: 1.6; stroke-linejoin: round }
  .val { stroke: #d9672b; fill: none; stroke-width: 2.2; stroke-linejoin: round }
  .dot { fill: #ffffff; stroke: #d9672b; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #98a3b3 } .title, .value { fill: #e6eaf0 }
    .page, .dot { fill: #161b22 } .grid { stroke: #2c343f } .axis { stroke: #6b7785 }
    .train { stroke: #6ea8ff } .val, .dot { stroke: #ff9d66 }
  }
</style>
)";

std::string legend_entry(double x, const char* kind, const std::string& text) {
  return fmt::format(
      "<path class=\"{}\" d=\"M{:.0f} 26H{:.0f}\"/><text class=\"value\" x=\"{:.0f}\" y=\"30\">{}"
      "</text>\n",
      kind, x, x + 22, x + 29, text);
}

}  // namespace

std::string loss_svg(const std::string& title, const std::vector<train::LossPoint>& train,
                     const std::vector<train::LossPoint>& val) {
  const auto train_points = thin(train, 600);
  const auto val_points = thin(val, 200);
  double last_step = 0, low = std::numeric_limits<double>::infinity(), high = -low;
  for (const auto* points : {&train_points, &val_points}) {
    for (const Point& p : *points) {
      last_step = std::max(last_step, p.x);
      low = std::min(low, p.y);
      high = std::max(high, p.y);
    }
  }
  const Plot plot{Axis(0, last_step, 8, true), Axis(low, high, 6, false)};

  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\" aria-label=\"{2}\">\n{3}"
      "<rect class=\"page\" width=\"{0}\" height=\"{1}\" rx=\"8\"/>\n"
      "<text class=\"title\" x=\"{4}\" y=\"31\">{2}</text>\n",
      kWidth, kHeight, escape(shorten(title)), kStyle, kLeft);
  for (const double v : plot.y.ticks()) {
    out += fmt::format(
        "<path class=\"grid\" d=\"M{} {:.1f}H{}\"/><text x=\"{}\" y=\"{:.1f}\" "
        "text-anchor=\"end\">{}</text>\n",
        kLeft, plot.py(v), kWidth - kRight, kLeft - 8, plot.py(v) + 4.5, plot.y.label(v));
  }
  for (const double v : plot.x.ticks()) {
    out += fmt::format(
        "<path class=\"axis\" d=\"M{0:.1f} {1}v5\"/><text x=\"{0:.1f}\" y=\"{2}\" "
        "text-anchor=\"middle\">{3}</text>\n",
        plot.px(v), kHeight - kBottom, kHeight - kBottom + 20, plot.x.label(v));
  }
  out += fmt::format(
      "<path class=\"axis\" d=\"M{} {}H{}\"/>\n<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step"
      "</text>\n<text transform=\"translate(18 {}) rotate(-90)\" text-anchor=\"middle\">loss (nats "
      "per token)</text>\n",
      kLeft, kHeight - kBottom, kWidth - kRight, (kLeft + kWidth - kRight) / 2, kHeight - 12,
      (kTop + kHeight - kBottom) / 2);

  double legend_x = kWidth - kRight - 300;
  if (!train_points.empty()) {
    out += fmt::format("<path class=\"train\" d=\"{}\"/>\n", plot.path(train_points));
    out += legend_entry(legend_x, "train", fmt::format("training {:.3f}", train_points.back().y));
    legend_x += 150;
  }
  if (!val_points.empty()) {
    out += fmt::format("<path class=\"val\" d=\"{}\"/>\n", plot.path(val_points));
    for (const Point& p : val_points) {
      if (val_points.size() > 40) break;  // dots would hide the line
      out += fmt::format("<circle class=\"dot\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.2\"/>\n",
                         plot.px(p.x), plot.py(p.y));
    }
    out += legend_entry(legend_x, "val", fmt::format("validation {:.3f}", val_points.back().y));
  }
  return out + "</svg>\n";
}

}  // namespace tessera::tools
