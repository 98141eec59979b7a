#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/tessera/plot/figure.h"
#include "tools/tessera/plot/run_metrics.h"

namespace tessera::tools {

enum class PlotAxis : std::uint8_t { Step, Tokens, Time };

struct PlotOptions {
  std::vector<std::string> keys;  ///< of metrics.jsonl; empty: the usual ones that a run has
  PlotAxis x = PlotAxis::Step;
  /// Window of the smoothing, in values; 0: none. Not given: 2% of a run's values, if there are more
  /// than 200.
  std::optional<std::int64_t> smooth = {};
};

/// The keys to show. @throws InvalidArgument naming a key that no run has
std::vector<std::string> shown_keys(std::span<const RunMetrics> runs, const PlotOptions& options);

/// "loss (nats per token)"
std::string title_of(const std::string& key);

/// One panel per key; `loss` and `val_loss` share one.
/// @param runs  at most kCurveStyles
Figure make_figure(std::span<const RunMetrics> runs, const PlotOptions& options);

/// SVG of the losses in a run's metrics.jsonl. @throws IoError as read_run() does
std::string loss_picture(const std::filesystem::path& run);

/// Means of the `window` values around every eighth part of a window. Near the start the window is shorter on both
/// sides, so that the first value stays; the last one is the mean of the values before it. Values that are not finite
/// stay, and do not count.
std::vector<Point> smoothed(const std::vector<Point>& points, std::int64_t window);

}  // namespace tessera::tools
