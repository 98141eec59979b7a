#include "io/checkpoint/diff.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/base/memory.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/safetensors/dtype.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/train/checkpoints.h"
#include "train/nonfinite.h"

namespace tessera::tools {
namespace {

using Kind = io::TensorDifference::Kind;

struct DiffCommand {
  std::string a, b, what = "model", step = "latest";
  io::DiffOptions diff;
  bool all = false, json = false;
};

std::string_view kind_name(Kind kind) {
  static constexpr std::array<std::string_view, 5> kNames = {"only in A", "only in B", "shape",
                                                             "dtype", "values"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::vector<std::int64_t> place_of(std::int64_t element, const Shape& shape) {
  std::vector<std::int64_t> place(static_cast<std::size_t>(shape.size()));
  for (int i = shape.size() - 1; i >= 0; --i) {
    place[static_cast<std::size_t>(i)] = element % shape[i];
    element /= shape[i];
  }
  return place;
}

bool has_values(const io::TensorDifference& difference) {
  return difference.kind == Kind::Values || difference.kind == Kind::Dtype;
}

std::string describe(const io::TensorDifference& d) {
  std::string text;
  switch (d.kind) {
    case Kind::OnlyInA:
      return fmt::format("only in A: {} {}", d.dtype_a, d.shape_a);
    case Kind::OnlyInB:
      return fmt::format("only in B: {} {}", d.dtype_b, d.shape_b);
    case Kind::Shape:
      return fmt::format("shape {} in A, {} in B", d.shape_a, d.shape_b);
    case Kind::Dtype:
      text = fmt::format("{} in A, {} in B; ", d.dtype_a, d.dtype_b);
      if (d.count == 0) return text + "values equal";
      break;
    case Kind::Values:
      break;
  }
  return text + fmt::format(
                    "{} of {} differ, by up to {:.6g} at [{}] ({:.9g} and {:.9g}), "
                    "relatively by up to {:.3g}; the first at [{}]",
                    d.count, d.elements, d.max_absolute,
                    fmt::join(place_of(d.max_element, d.shape_a), ", "), d.a, d.b, d.max_relative,
                    fmt::join(place_of(d.first, d.shape_a), ", "));
}

// JSON has no infinity and no NaN.
io::Json number(double value) {
  return std::isfinite(value) ? io::Json(value) : io::Json(train::non_finite_word(value));
}

io::Json to_json(const io::TensorDifference& d) {
  const auto shape = [](const Shape& s) { return std::vector<std::int64_t>(s.begin(), s.end()); };
  io::Json json{{"tensor", d.name}, {"kind", kind_name(d.kind)}, {"a", nullptr}, {"b", nullptr}};
  if (d.kind != Kind::OnlyInB) {
    json["a"] = {{"dtype", io::safetensors_dtype_name(d.dtype_a)}, {"shape", shape(d.shape_a)}};
  }
  if (d.kind != Kind::OnlyInA) {
    json["b"] = {{"dtype", io::safetensors_dtype_name(d.dtype_b)}, {"shape", shape(d.shape_b)}};
  }
  if (!has_values(d)) return json;
  json["elements"] = d.elements;
  json["differing"] = d.count;
  if (d.count == 0) return json;
  json["first"] = place_of(d.first, d.shape_a);
  json["max_absolute"] = number(d.max_absolute);
  json["max_relative"] = number(d.max_relative);
  json["max_at"] = place_of(d.max_element, d.shape_a);
  json["a"]["value"] = number(d.a);
  json["b"]["value"] = number(d.b);
  return json;
}

void print_json(const io::CheckpointReader& a, const io::CheckpointReader& b,
                const io::DiffReport& report) {
  io::Json differences = io::Json::array(), settings = io::Json::object();
  for (const auto& difference : report.differences) differences.push_back(to_json(difference));
  const auto setting = [](const std::string& text) {
    return text.empty() ? io::Json(nullptr) : io::Json::parse(text);
  };
  for (const auto& [key, in_a, in_b] : report.settings) {
    settings[key] = {setting(in_a), setting(in_b)};
  }
  const io::Json json{{"a", a.path().string()},
                      {"b", b.path().string()},
                      {"equal", report.equal()},
                      {"compared", report.compared},
                      {"bytes_read", report.bytes_read},
                      {"settings", std::move(settings)},
                      {"differences", std::move(differences)}};
  fmt::print("{}\n", io::dump_json(json));
}

// Sort key: tensors without comparable values first, then by the largest difference.
double weight(const io::TensorDifference& d) {
  if (!has_values(d) || std::isnan(d.max_absolute)) return std::numeric_limits<double>::infinity();
  return d.count == 0 ? 0 : d.max_absolute;
}

void print_differences(const io::DiffReport& report, bool all) {
  std::vector<const io::TensorDifference*> order;
  std::int64_t values = 0, elements = 0, one_sided = 0;
  for (const auto& d : report.differences) {
    order.push_back(&d);
    one_sided += d.kind == Kind::OnlyInA || d.kind == Kind::OnlyInB ? 1 : 0;
    if (!has_values(d)) continue;
    values += d.count;
    elements += d.elements;
  }
  std::ranges::stable_sort(order, std::ranges::greater{}, [](const auto* d) { return weight(*d); });
  constexpr std::size_t kShown = 10;
  const std::size_t shown = all ? order.size() : std::min(order.size(), kShown);
  for (std::size_t i = 0; i < shown; ++i)
    fmt::print("{}: {}\n", escaped(order[i]->name), describe(*order[i]));
  if (shown < order.size())
    fmt::print("... and {} with smaller differences; --all shows them\n", order.size() - shown);
  fmt::print("{} of {} tensors differ", order.size(), report.compared + one_sided);
  if (elements > 0) fmt::print(", in {} of {} values", values, elements);
  fmt::print("\n");
}

int run_diff(const DiffCommand& options) {
  const auto open = [&](const std::string& path) {
    return io::open_checkpoint(path, parse_step(path, options.step));
  };
  const auto a = open(options.a), b = open(options.b);
  io::DiffOptions diff = options.diff;
  require(diff.threads >= 1, "--jobs {}: expected at least 1", diff.threads);
  require(diff.absolute >= 0 && diff.relative >= 0, "a tolerance must not be negative");
  diff.model = options.what != "optimizer";
  diff.optimizer = options.what != "model";
  ByteProgress progress("compared");
  diff.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const io::DiffReport report = io::diff_checkpoints(a, b, diff);
  const int code = report.equal() ? 0 : 1;
  if (options.json) {
    print_json(a, b, report);
    return code;
  }
  fmt::print("A: {} (step {}, {} ranks)\nB: {} (step {}, {} ranks)\n", a.path().string(),
             a.index().step, a.index().world_size, b.path().string(), b.index().step,
             b.index().world_size);
  for (const auto& [key, in_a, in_b] : report.settings) {
    fmt::print("model.{}: {} in A, {} in B\n", key, in_a.empty() ? "absent" : in_a,
               in_b.empty() ? "absent" : in_b);
  }
  if (report.equal()) {
    fmt::print("equal: {} tensors, {}\n", report.compared,
               report.bytes_read == 0
                   ? "by the checksums in their indexes, without reading the data"
                   : fmt::format("{} read", format_bytes(report.bytes_read)));
  } else {
    print_differences(report, options.all);
  }
  return code;
}

}  // namespace

Command add_checkpoint_diff(CLI::App& parent) {
  const auto options = std::make_shared<DiffCommand>();
  io::DiffOptions& diff = options->diff;
  diff.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  CLI::App* app = parent.add_subcommand(
      "diff",
      "Show which tensors of two checkpoints differ, and by how much, for any numbers of ranks. "
      "Exit code 0: equal, 1: different");
  app->add_option("A", options->a, kOneCheckpoint)->required();
  app->add_option("B", options->b, kOneCheckpoint)->required();
  app->add_option("--what", options->what, "Weights, optimizer state, or both")
      ->check(CLI::IsMember({"model", "optimizer", "all"}))
      ->capture_default_str();
  app->add_option("--tolerance", diff.absolute, "Treat values as equal if |a - b| is at most this")
      ->capture_default_str();
  app->add_option("--relative-tolerance", diff.relative,
                  "Also allow a difference of this times the larger of |a| and |b|")
      ->capture_default_str();
  app->add_option("--jobs", diff.threads, "Threads, with 3 MiB of memory each")
      ->capture_default_str();
  app->add_option("--step", options->step, std::string(kStepHelp) + "; for A and B alike")
      ->capture_default_str();
  app->add_flag("--all", options->all, "Show every tensor that differs, not only the 10 largest");
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_diff(*options); }};
}

}  // namespace tessera::tools
