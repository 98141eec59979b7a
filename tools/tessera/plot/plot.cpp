#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "io/base/file.h"
#include "tools/tessera/command.h"
#include "tools/tessera/plot/csv.h"
#include "tools/tessera/plot/figure.h"
#include "tools/tessera/plot/panels.h"
#include "tools/tessera/plot/png.h"
#include "tools/tessera/plot/run_metrics.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::vector<std::string> runs;
  std::string output;
  std::string x = "step";
  PlotOptions plot;
};

// Runs that can't be read are named, and left out if there are others.
std::vector<RunMetrics> read_runs(const std::vector<std::string>& given) {
  std::vector<fs::path> paths;
  std::set<fs::path> seen;
  std::vector<RunMetrics> runs;
  std::string problem;
  for (const std::string& path : given) {
    std::error_code error;
    fs::path canonical = fs::weakly_canonical(path, error);
    if (canonical.filename() == "metrics.jsonl") canonical = canonical.parent_path();
    if (!error && !seen.insert(canonical).second) continue;
    try {
      RunFile file = read_run(path);
      for (const std::string& warning : file.warnings)
        fmt::print(stderr, "warning: {}\n", escaped(warning));
      runs.push_back(std::move(file.run));
      paths.emplace_back(path);
    } catch (const IoError& error) {
      if (!problem.empty()) fmt::print(stderr, "warning: {}\n", escaped(problem));
      problem = error.what();
    }
  }
  if (runs.empty()) throw IoError("{}", problem);
  if (!problem.empty()) fmt::print(stderr, "warning: {}; left out\n", escaped(problem));
  const auto names = short_names(paths);
  for (std::size_t i = 0; i < runs.size(); ++i) runs[i].name = escaped(names[i]);
  return runs;
}

std::string value_text(const std::string& key, double value) {
  if (!std::isfinite(value)) return "-";
  if (key == "mfu") return fmt::format("{:.3g}", 100 * value);
  if (key == "memory_bytes") return format_bytes(static_cast<std::int64_t>(value));
  return std::abs(value) >= 1e4 && std::abs(value) < 1e15 ? format_count(value)
                                                          : fmt::format("{:.4g}", value);
}

// A line per metric and run: a small curve, and values.
void print_curves(const std::vector<RunMetrics>& runs, const PlotOptions& options) {
  constexpr int kWidth = 40;
  std::size_t widest = 0;
  for (const RunMetrics& run : runs) widest = std::max(widest, run.name.size());
  for (const std::string& key : shown_keys(runs, options)) {
    fmt::print("{:<{}} {:>11} {:>11} {:>11} {:>11}\n", title_of(key), widest + 3 + kWidth, "first",
               "last", "lowest", "highest");
    for (const RunMetrics& run : runs) {
      const auto found = run.values.find(key);
      if (found == run.values.end()) continue;
      std::vector<double> values;
      double low = std::nan(""), high = low;
      for (const RunMetrics::Sample& sample : found->second) {
        values.push_back(sample.value);
        low = std::fmin(low, sample.value);  // ignores NaN
        high = std::fmax(high, sample.value);
      }
      fmt::print("  {:<{}} {}", run.name, widest, sparkline(values, kWidth));
      for (const double value : {values.front(), values.back(), low, high})
        fmt::print(" {:>11}", value_text(key, value));
      fmt::print("\n");
    }
  }
}

int run(const Options& options) {
  const std::string extension = fs::path(options.output).extension().string();
  require(
      options.output.empty() || extension == ".svg" || extension == ".png" || extension == ".csv",
      "--output {}: the name must end in .svg, .png or .csv", options.output);
  const std::vector<RunMetrics> runs = read_runs(options.runs);
  if (options.output.empty()) {
    print_curves(runs, options.plot);
    return 0;
  }
  if (extension == ".csv") {
    if (!options.plot.keys.empty()) shown_keys(runs, options.plot);  // all exist
    io::write_file_atomically(options.output, to_csv(runs, options.plot.keys));
    return 0;
  }
  const Drawing drawing = draw(make_figure(runs, options.plot));
  io::write_file_atomically(options.output, extension == ".png" ? to_png(drawing) : drawing.svg);
  return 0;
}

}  // namespace

Command add_plot(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("plot",
                                        "Show loss, learning rate, speed, memory and other metrics "
                                        "of runs: on the console, in one picture, or as CSV");
  app->add_option(
         "RUN", options->runs,
         "Run directories (--run.out), also of runs that train now, or metrics.jsonl files")
      ->required();
  app->add_option(
      "-o,--output", options->output,
      "File to write: FILE.svg or FILE.png for a picture, FILE.csv for all values; small "
      "curves on the console if not given");
  app->add_option("--key", options->plot.keys,
                  "Metrics to show, of metrics.jsonl: loss val_loss lr grad_norm tokens_per_s "
                  "memory_bytes mfu, which are shown if not given, step_ms, ...")
      ->allow_extra_args(false);
  app->add_option("--x", options->x, "Horizontal axis: step, tokens, or time (of training)")
      ->check(CLI::IsMember({"step", "tokens", "time"}))
      ->capture_default_str();
  app->add_option(
         "--smooth", options->plot.smooth,
         "Window of the smoothed curves, in steps; 0: no smoothing; if not given, 2% of the "
         "steps of runs of more than 200")
      ->check(CLI::Range(0, 1'000'000'000));
  return {app, [options] {
            options->plot.x = options->x == "tokens" ? PlotAxis::Tokens
                              : options->x == "time" ? PlotAxis::Time
                                                     : PlotAxis::Step;
            return run(*options);
          }};
}

}  // namespace tessera::tools
