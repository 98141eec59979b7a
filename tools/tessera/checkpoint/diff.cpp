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
#include <optional>
#include <utility>

#include "core/base/memory.h"
#include "core/base/processors.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/diff_sources.h"
#include "io/consolidate/options.h"
#include "io/safetensors/dtype.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"
#include "tools/tessera/command.h"
#include "tools/tessera/consolidate/names.h"
#include "tools/tessera/consolidate/plan.h"
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
  io::OptionTexts names;  ///< all options, of which those of names are read
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

std::string dtype_text(DType dtype, const std::string& opaque) {
  return opaque.empty() ? fmt::format("{}", dtype) : opaque;
}

std::string describe(const io::TensorDifference& d) {
  const std::string dtype_a = dtype_text(d.dtype_a, d.opaque_a),
                    dtype_b = dtype_text(d.dtype_b, d.opaque_b);
  std::string text;
  switch (d.kind) {
    case Kind::OnlyInA:
      return fmt::format("only in A: {} {}", dtype_a, d.shape_a);
    case Kind::OnlyInB:
      return fmt::format("only in B: {} {}", dtype_b, d.shape_b);
    case Kind::Shape:
      return fmt::format("shape {} in A, {} in B", d.shape_a, d.shape_b);
    case Kind::Dtype:
      text = fmt::format("{} in A, {} in B; ", dtype_a, dtype_b);
      if (!d.opaque_a.empty() || !d.opaque_b.empty()) return text + "values not compared";
      if (d.count == 0) return text + "values equal";
      break;
    case Kind::Values:
      if (d.opaque_a.empty()) break;
      return fmt::format("{} of {} {} values differ, the first at [{}]", d.count, d.elements,
                         d.opaque_a, fmt::join(place_of(d.first, d.shape_a), ", "));
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
  const auto dtype_of = [](DType dtype, const std::string& opaque) {
    return opaque.empty() ? std::string(io::safetensors_dtype_name(dtype)) : opaque;
  };
  io::Json json{{"tensor", d.name}, {"kind", kind_name(d.kind)}, {"a", nullptr}, {"b", nullptr}};
  if (d.kind != Kind::OnlyInB) {
    json["a"] = {{"dtype", dtype_of(d.dtype_a, d.opaque_a)}, {"shape", shape(d.shape_a)}};
  }
  if (d.kind != Kind::OnlyInA) {
    json["b"] = {{"dtype", dtype_of(d.dtype_b, d.opaque_b)}, {"shape", shape(d.shape_b)}};
  }
  if (!has_values(d) || d.elements == 0) return json;
  if (d.kind == Kind::Dtype) json["rounded"] = d.is_rounding();
  json["elements"] = d.elements;
  json["differing"] = d.count;
  if (d.count == 0) return json;
  json["first"] = place_of(d.first, d.shape_a);
  if (!d.opaque_a.empty()) return json;
  json["max_absolute"] = number(d.max_absolute);
  json["max_relative"] = number(d.max_relative);
  json["max_at"] = place_of(d.max_element, d.shape_a);
  json["a"]["value"] = number(d.a);
  json["b"]["value"] = number(d.b);
  return json;
}

// Explains differing dtypes if one side is the other one, rounded; else empty.
std::string rounding(const io::DiffReport& report) {
  std::string text;
  for (const io::TensorDifference& d : report.differences) {
    if (d.kind == Kind::Values || (d.kind == Kind::Dtype && !d.is_rounding())) return "";
    if (d.kind != Kind::Dtype) continue;
    const bool b_is_narrow = dtype_size(d.dtype_b) < dtype_size(d.dtype_a);
    const std::string each =
        fmt::format("{} is {} rounded to {}", b_is_narrow ? "B" : "A", b_is_narrow ? "A" : "B",
                    b_is_narrow ? d.dtype_b : d.dtype_a);
    if (!text.empty() && text != each) return "";
    text = each;
  }
  return text;
}

/// One side of the comparison.
struct Compared {
  std::string path, kind, about;  // about: step and ranks
  std::string skipped;            // entries that are not compared, by reason
};

void print_json(const Compared& a, const Compared& b, const io::DiffReport& report) {
  io::Json differences = io::Json::array(), settings = io::Json::object();
  for (const auto& difference : report.differences) differences.push_back(to_json(difference));
  const auto setting = [](const std::string& text) {
    return text.empty() ? io::Json(nullptr) : io::Json::parse(text);
  };
  for (const auto& [key, in_a, in_b] : report.settings) {
    settings[key] = {setting(in_a), setting(in_b)};
  }
  const std::string rounded = rounding(report);
  const io::Json json{{"a", a.path},
                      {"b", b.path},
                      {"kind_a", a.kind},
                      {"kind_b", b.kind},
                      {"skipped_a", a.skipped},
                      {"skipped_b", b.skipped},
                      {"equal", report.equal()},
                      {"compared", report.compared},
                      {"rounded", report.rounded},
                      {"rounding", rounded.empty() ? io::Json(nullptr) : io::Json(rounded)},
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

void print_text(const Compared& a, const Compared& b, const io::DiffReport& report, bool all) {
  for (const auto& [name, side] : {std::pair('A', &a), std::pair('B', &b)}) {
    fmt::print("{}: {} ({})\n", name, escaped(side->path), side->about);
    if (!side->skipped.empty()) fmt::print("   not compared: {}\n", side->skipped);
  }
  for (const auto& [key, in_a, in_b] : report.settings) {
    fmt::print("model.{}: {} in A, {} in B\n", key, in_a.empty() ? "absent" : in_a,
               in_b.empty() ? "absent" : in_b);
  }
  if (!report.equal()) {
    print_differences(report, all);
    const std::string rounded = rounding(report);
    if (!rounded.empty()) fmt::print("{}; --rounded accepts that\n", rounded);
    if (report.compared == 0)
      fmt::print(
          "no tensor has the same name in A and B: name the model with --config, or change "
          "names with --strip and --rename\n");
    return;
  }
  fmt::print("equal: {} tensors, {}{}\n", report.compared,
             report.bytes_read == 0 ? "by the checksums in their indexes, without reading the data"
                                    : fmt::format("{} read", format_bytes(report.bytes_read)),
             report.rounded == 0
                 ? ""
                 : fmt::format("; {} of them rounded to another dtype", report.rounded));
}

int run_diff(const DiffCommand& options) {
  io::DiffOptions diff = options.diff;
  require(diff.threads >= 1, "--jobs {}: expected at least 1", diff.threads);
  require(diff.absolute >= 0 && diff.relative >= 0, "a tolerance must not be negative");
  diff.model = options.what != "optimizer";
  diff.optimizer = options.what != "model";
  ByteProgress checked("compared with seals");
  std::optional<ByteProgress> progress;  // timed from its first call
  diff.progress = [&](std::int64_t done, std::int64_t total) {
    if (!progress) progress.emplace("compared");
    progress->update(done, total);
  };
  Compared a, b;
  io::DiffReport report;
  if (io::is_foreign(options.a) || io::is_foreign(options.b)) {
    const std::string& ours = io::is_foreign(options.a) ? options.b : options.a;
    require(options.step == "latest" || !io::is_foreign(ours),
            "neither {} nor {} is a tessera checkpoint, which has steps; omit --step", options.a,
            options.b);
    io::SourceDiff result =
        io::diff_sources(options.a, options.b,
                         {.diff = diff,
                          .names = io::name_rules(options.names),
                          .config_file = io::config_file(options.names),
                          .like = io::like_directory(options.names),
                          .step = parse_step(ours, options.step),
                          .checked = [&](auto done, auto total) { checked.update(done, total); }});
    for (const auto& [name, side] : {std::pair('A', &result.a), std::pair('B', &result.b)})
      for (const std::string& warning : side->warnings)
        fmt::print(stderr, "tessera: warning: {}: {}\n", name, escaped(warning));
    const auto compared = [](const io::SourceDiff::Side& side) {
      return Compared{side.path.string(), side.kind, side.kind, format_skipped(side.skipped)};
    };
    a = compared(result.a);
    b = compared(result.b);
    report = std::move(result.report);
  } else {
    const io::NameRules rules = io::name_rules(options.names);
    require(!io::config_file(options.names) && !io::like_directory(options.names) &&
                rules.is_auto() && rules.renames.empty() && rules.select.empty() &&
                rules.exclude.empty(),
            "the names of tessera's checkpoints are known; omit --config, --like, --strip, "
            "--rename, --select and --exclude");
    const auto open = [&](const std::string& path) {
      io::refuse_parent_of_shards(path);
      return io::open_checkpoint(path, parse_step(path, options.step));
    };
    const auto reader_a = open(options.a), reader_b = open(options.b);
    report = io::diff_checkpoints(reader_a, reader_b, diff);
    const auto compared = [](const io::CheckpointReader& reader) {
      return Compared{
          reader.path().string(), "tessera checkpoint",
          fmt::format("step {}, {} ranks", reader.index().step, reader.index().world_size), ""};
    };
    a = compared(reader_a);
    b = compared(reader_b);
  }
  if (options.json)
    print_json(a, b, report);
  else
    print_text(a, b, report, options.all);
  return report.equal() ? 0 : 1;
}

}  // namespace

Command add_checkpoint_diff(CLI::App& parent) {
  const auto options = std::make_shared<DiffCommand>();
  io::DiffOptions& diff = options->diff;
  diff.threads = std::min(usable_processors(), 8);
  CLI::App* app = parent.add_subcommand(
      "diff",
      "Show which tensors of two checkpoints differ, and by how much, for any numbers of ranks; of "
      "any kind that consolidate reads, under the names that it would write. Exit code 0: equal, "
      "1: different");
  app->add_option("A", options->a, kAnyCheckpoint)->required();
  app->add_option("B", options->b, kAnyCheckpoint)->required();
  app->add_option("--what", options->what, "Weights, optimizer state, or both")
      ->check(CLI::IsMember({"model", "optimizer", "all"}))
      ->capture_default_str();
  app->add_option("--tolerance", diff.absolute, "Treat values as equal if |a - b| is at most this")
      ->capture_default_str();
  app->add_option("--relative-tolerance", diff.relative,
                  "Also allow a difference of this times the larger of |a| and |b|")
      ->capture_default_str();
  app->add_flag("--rounded", diff.rounded,
                "Treat a tensor as equal if one side is the other, rounded to its dtype, as by "
                "consolidate --dtype");
  add_text(*app, "--config",
           "config.json of the model of other programs' shards, or its directory; default: "
           "that of A or B");
  add_text(*app, "--like",
           "Hugging Face directory with the names of the model of other programs' shards");
  add_name_rules(*app);
  app->add_option("--jobs", diff.threads, "Threads, with 4 MiB of memory each")
      ->capture_default_str();
  app->add_option("--step", options->step, std::string(kStepHelp) + "; for A and B alike")
      ->capture_default_str();
  app->add_flag("--all", options->all, "Show every tensor that differs, not only the 10 largest");
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [app, options] {
            options->names = option_texts(*app);
            return run_diff(*options);
          }};
}

}  // namespace tessera::tools
