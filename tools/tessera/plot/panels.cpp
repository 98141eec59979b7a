#include "tools/tessera/plot/panels.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <string_view>

#include "core/base/error.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

enum class Unit : std::uint8_t { None, Bytes, Percent };

struct Metric {
  std::string_view key, title;
  bool smooth = false, from_zero = false, may_be_log = false;
  Unit unit = Unit::None;
};

// In the order of the panels.
constexpr std::array kMetrics = {
    Metric{.key = "loss", .title = "loss (nats per token)", .smooth = true, .may_be_log = true},
    Metric{.key = "val_loss", .title = "validation loss (nats per token)", .may_be_log = true},
    Metric{.key = "lr", .title = "learning rate"},
    Metric{.key = "grad_norm", .title = "gradient norm", .smooth = true, .may_be_log = true},
    Metric{.key = "tokens_per_s", .title = "speed (tokens/s)", .smooth = true, .from_zero = true},
    Metric{.key = "memory_bytes",
           .title = "peak memory of rank 0",
           .from_zero = true,
           .unit = Unit::Bytes},
    Metric{.key = "mfu",
           .title = "model FLOPs utilization (%)",
           .smooth = true,
           .from_zero = true,
           .unit = Unit::Percent},
};
constexpr std::array kMoreMetrics = {
    Metric{.key = "step_ms", .title = "step time (ms)", .smooth = true, .from_zero = true},
    Metric{.key = "tokens", .title = "tokens per step", .from_zero = true},
    Metric{.key = "epoch", .title = "epochs", .from_zero = true},
    Metric{.key = "skipped", .title = "skipped steps", .from_zero = true},
};
constexpr std::array<std::string_view, 2> kTimes = {"time", "elapsed_s"};

// More raw curves than these would hide the smoothed ones.
constexpr std::size_t kMostFaint = 4;
// A range of more decades gets a logarithmic scale.
constexpr double kLogRatio = 100;

Metric metric_of(const std::string& key) {
  for (const Metric& metric : kMetrics)
    if (metric.key == key) return metric;
  for (const Metric& metric : kMoreMetrics)
    if (metric.key == key) return metric;
  return {.key = key, .title = key};
}

struct Divisor {
  double value = 1;
  std::string_view unit;
};

Divisor of_bytes(double most) {
  static constexpr std::array<std::string_view, 5> kUnits = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  Divisor divisor{.value = 1, .unit = kUnits[0]};
  for (std::size_t i = 1; i < kUnits.size() && most >= 1024 * divisor.value; ++i)
    divisor = {.value = 1024 * divisor.value, .unit = kUnits[i]};
  return divisor;
}

Divisor of_seconds(double most) {
  if (most >= 2 * 86400) return {.value = 86400, .unit = "days"};
  if (most >= 2 * 3600) return {.value = 3600, .unit = "hours"};
  if (most >= 300) return {.value = 60, .unit = "minutes"};
  return {.value = 1, .unit = "seconds"};
}

class Painter {
 public:
  Painter(std::span<const RunMetrics> runs, const PlotOptions& options)
      : runs_(runs), options_(options) {}

  Figure figure() {
    const auto keys = shown_keys(runs_, options_);
    Figure figure{
        .title = {}, .legend = {}, .x_title = "step", .x_scale = Scale::Whole, .panels = {}};
    if (options_.x == PlotAxis::Tokens) figure.x_title = "tokens";
    if (options_.x == PlotAxis::Time) {
      double most = 0;
      for (const RunMetrics& run : runs_) most = std::max(most, run.rows.back().seconds);
      const Divisor divisor = of_seconds(most);
      seconds_ = divisor.value;
      figure.x_title = fmt::format("time of training ({})", divisor.unit);
      figure.x_scale = Scale::Exact;
    }
    if (runs_.size() == 1) figure.title = runs_[0].name;
    for (std::size_t i = 0; runs_.size() > 1 && i < runs_.size(); ++i)
      figure.legend.push_back({.text = runs_[i].name, .style = i});
    const bool share =
        std::ranges::count(keys, "loss") > 0 && std::ranges::count(keys, "val_loss") > 0;
    for (const std::string& key : keys) {
      if (share && key == "val_loss") continue;
      figure.panels.push_back(panel(key, share && key == "loss"));
    }
    return figure;
  }

 private:
  std::vector<Point> points(const RunMetrics& run, const std::string& key, double factor) const {
    std::vector<Point> result;
    const auto found = run.values.find(key);
    if (found == run.values.end()) return result;
    for (const RunMetrics::Sample& sample : found->second) {
      const RunMetrics::Row& row = run.rows[sample.row];
      const double x = options_.x == PlotAxis::Step     ? static_cast<double>(row.step)
                       : options_.x == PlotAxis::Tokens ? row.tokens
                                                        : row.seconds / seconds_;
      result.push_back({x, sample.value * factor});
    }
    return result;
  }

  std::int64_t window(const Metric& metric, std::size_t values) const {
    constexpr std::size_t kFew = 200, kShare = 50;
    if (!metric.smooth) return 0;
    if (options_.smooth) return *options_.smooth;
    return values > kFew ? static_cast<std::int64_t>(values / kShare) : 0;
  }

  Panel panel(const std::string& key, bool with_validation) const {
    const Metric metric = metric_of(key);
    Panel panel{.title = std::string(metric.title),
                .scale = Scale::Linear,
                .from_zero = metric.from_zero,
                .legend = {},
                .curves = {}};
    double factor = metric.unit == Unit::Percent ? 100 : 1;
    if (metric.unit == Unit::Bytes) {
      double most = 0;
      for (const RunMetrics& run : runs_)
        for (const Point& point : points(run, key, 1)) most = std::max(most, point.y);
      const Divisor divisor = of_bytes(most);
      factor = 1 / divisor.value;
      panel.title += fmt::format(" ({})", divisor.unit);
    }
    for (std::size_t i = 0; i < runs_.size(); ++i)
      add_curves(panel, i, metric, points(runs_[i], key, factor));
    if (with_validation) {
      const bool single = runs_.size() == 1;
      const std::string last = last_value(panel.curves.back(), single);
      for (std::size_t i = 0; i < runs_.size(); ++i)
        panel.curves.push_back({.name = runs_[i].name + ": validation",
                                .style = single ? 1 : i,
                                .line = LineStyle::Marked,
                                .points = points(runs_[i], "val_loss", 1)});
      panel.legend = {{.text = "training" + last, .style = 0, .neutral = !single}};
      if (std::ranges::count(panel.curves, LineStyle::Faint, &Curve::line) > 0)
        panel.legend.push_back({.text = "each step", .line = LineStyle::Faint, .neutral = !single});
      panel.legend.push_back({.text = "validation" + last_value(panel.curves.back(), single),
                              .style = 1,
                              .line = LineStyle::Marked,
                              .neutral = !single});
    }
    set_scale(panel, metric);
    return panel;
  }

  static std::string last_value(const Curve& curve, bool single) {
    return single && !curve.points.empty() ? fmt::format(" {:.3f}", curve.points.back().y)
                                           : std::string();
  }

  void add_curves(Panel& panel, std::size_t run, const Metric& metric,
                  std::vector<Point> raw) const {
    const std::string& name = runs_[run].name;
    const LineStyle style = metric.key == "val_loss" ? LineStyle::Marked : LineStyle::Plain;
    const std::int64_t count = window(metric, raw.size());
    if (count < 2) {
      panel.curves.push_back({.name = name, .style = run, .line = style, .points = std::move(raw)});
      return;
    }
    std::vector<Point> smooth = smoothed(raw, count);
    if (runs_.size() <= kMostFaint)
      panel.curves.push_back({.name = name + ": each step",
                              .style = run,
                              .line = LineStyle::Faint,
                              .points = std::move(raw)});
    panel.curves.push_back({.name = fmt::format("{}: mean of {}", name, count),
                            .style = run,
                            .line = style,
                            .points = std::move(smooth)});
  }

  // Logarithmic if the values are positive and differ much.
  static void set_scale(Panel& panel, const Metric& metric) {
    if (!metric.may_be_log) return;
    double low = std::numeric_limits<double>::infinity(), high = 0;
    for (const Curve& curve : panel.curves)
      for (const Point& point : curve.points)
        if (std::isfinite(point.y)) {
          low = std::min(low, point.y);
          high = std::max(high, point.y);
        }
    if (low > 0 && high > kLogRatio * low) panel.scale = Scale::Log;
  }

  std::span<const RunMetrics> runs_;
  const PlotOptions& options_;
  double seconds_ = 1;  // per unit of the time axis
};

}  // namespace

std::vector<std::string> shown_keys(std::span<const RunMetrics> runs, const PlotOptions& options) {
  std::set<std::string> found;
  for (const RunMetrics& run : runs)
    for (const std::string& key : run.keys)
      if (std::ranges::count(kTimes, key) == 0) found.insert(key);
  std::vector<std::string> keys;
  for (const std::string& key : options.keys) {
    require(found.contains(key), "no run has the metric '{}'; there are {}", key,
            fmt::join(found, ", "));
    if (std::ranges::count(keys, key) == 0) keys.push_back(key);
  }
  if (options.keys.empty())
    for (const Metric& metric : kMetrics)
      if (found.contains(std::string(metric.key))) keys.emplace_back(metric.key);
  require(!keys.empty(), "no run has a metric that can be plotted; there are {}",
          fmt::join(found, ", "));
  return keys;
}

std::string title_of(const std::string& key) { return std::string(metric_of(key).title); }

Figure make_figure(std::span<const RunMetrics> runs, const PlotOptions& options) {
  require(runs.size() <= kCurveStyles, "{} runs do not fit one picture; plot at most {}",
          runs.size(), kCurveStyles);
  return Painter(runs, options).figure();
}

std::string loss_picture(const std::filesystem::path& path) {
  RunMetrics run = read_run(path).run;
  run.name = escaped(path.string());
  PlotOptions options;
  for (const char* key : {"loss", "val_loss"})
    if (run.values.contains(key)) options.keys.emplace_back(key);
  return draw(make_figure({&run, 1}, options)).svg;
}

std::vector<Point> smoothed(const std::vector<Point>& points, std::int64_t window) {
  const auto half = static_cast<std::size_t>(std::max<std::int64_t>(0, window) / 2);
  const std::size_t stride = std::max<std::size_t>(1, half / 4);
  std::vector<Point> result;
  for (std::size_t i = 0; i < points.size(); i += stride) {
    if (i + stride >= points.size()) i = points.size() - 1;
    Point mean = points[i];
    if (std::isfinite(mean.y)) {
      const std::size_t before = std::min(half, i);
      const std::size_t end = std::min(i + before, points.size() - 1) + 1;
      double sum = 0, count = 0;
      for (std::size_t k = i - before; k < end; ++k) {
        if (!std::isfinite(points[k].y)) continue;
        sum += points[k].y;
        count += 1;
      }
      mean.y = sum / count;
    }
    result.push_back(mean);
  }
  return result;
}

}  // namespace tessera::tools
