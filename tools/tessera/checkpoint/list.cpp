#include "io/checkpoint/list.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/base/memory.h"
#include "io/base/json.h"
#include "io/source/find_sharded.h"
#include "io/source/other_formats.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {
namespace {

struct ListCommand {
  std::string path;
  bool json = false;
};

std::optional<std::int64_t> age_of(std::optional<std::int64_t> time) {
  if (!time) return std::nullopt;
  return std::max<std::int64_t>(0, std::time(nullptr) - *time);
}

io::Json to_json(const io::ListedCheckpoint& entry, bool newest) {
  io::Json row{{"path", entry.path.string()},
               {"kind", "tessera checkpoint"},
               {"step", entry.step},
               {"state", io::state_name(entry.state)},
               {"problem", nullptr},
               {"bytes", entry.bytes},
               {"age_s", nullptr},
               {"newest", newest}};
  if (!entry.problem.empty()) row["problem"] = entry.problem;
  if (const auto age = age_of(entry.time)) row["age_s"] = *age;
  if (entry.index) {
    row["sections"] = entry.sections;
    row["world_size"] = entry.index->world_size;
    row["created"] = entry.index->created;
    row["run_id"] = entry.index->run_id;
  }
  return row;
}

const char* state_of(const io::FoundCheckpoint& found) {
  return found.problem.empty() ? "complete" : "incomplete";
}

io::Json to_json(const io::FoundCheckpoint& found) {
  io::Json row{{"path", found.path.string()},  {"kind", found.kind},    {"step", nullptr},
               {"state", state_of(found)},     {"problem", nullptr},    {"bytes", found.bytes},
               {"age_s", *age_of(found.time)}, {"newest", found.newest}};
  if (found.step) row["step"] = *found.step;
  if (!found.problem.empty()) row["problem"] = found.problem;
  return row;
}

std::string rough(std::int64_t seconds) {
  return seconds < 60 ? fmt::format("{} s", seconds)
                      : format_duration(static_cast<double>(seconds));
}

void print_row(const std::string& step, std::string_view state, std::optional<std::int64_t> age,
               std::int64_t bytes, const std::string& what) {
  fmt::print("{:>10}  {:<12}  {:>8}  {:>10}  {}\n", step, state, age ? rough(*age) : "?",
             format_bytes(bytes), escaped(what));
}

int run_list(const ListCommand& options) {
  std::error_code error;
  std::vector<io::ListedCheckpoint> entries;
  if (!io::fs::is_regular_file(options.path, error))
    entries = io::list_checkpoints(options.path, [](const io::CheckpointReader& reader) {
      if (reader.index().trainer) train::read_trainer_state(reader);  // throws if invalid
    });
  const std::vector<io::FoundCheckpoint> foreign = io::find_sharded(options.path);
  const auto newest = std::find_if(entries.rbegin(), entries.rend(), [](const auto& entry) {
    return entry.state == io::CheckpointState::Committed;
  });
  const auto is_newest = [&](const io::ListedCheckpoint& entry) {
    return newest != entries.rend() && &entry == &*newest;
  };
  const int code = entries.empty() && foreign.empty() ? kFailed : 0;
  if (options.json) {
    io::Json rows = io::Json::array();
    for (const io::ListedCheckpoint& entry : entries)
      rows.push_back(to_json(entry, is_newest(entry)));
    for (const io::FoundCheckpoint& found : foreign) rows.push_back(to_json(found));
    fmt::print("{}\n", io::dump_json(rows));
    return code;
  }
  if (code != 0) {
    const std::string other = io::describe_other_format(options.path);
    fmt::print("{} contains no checkpoint, down to three levels below it{}\n",
               escaped(options.path), other.empty() ? "" : "; it holds " + escaped(other));
    return code;
  }
  fmt::print("{:>10}  {:<12}  {:>8}  {:>10}  {}\n", "step", "state", "age", "size", "what");
  for (const io::ListedCheckpoint& entry : entries) {
    std::string what = entry.problem;
    if (entry.index) {
      what =
          fmt::format("{}, {}{}", fmt::join(entry.sections, ", "),
                      counted(entry.index->world_size, "rank"), is_newest(entry) ? ", newest" : "");
    }
    print_row(std::to_string(entry.step), io::state_name(entry.state), age_of(entry.time),
              entry.bytes, what);
  }
  for (const io::FoundCheckpoint& found : foreign) {
    print_row(
        found.step ? std::to_string(*found.step) : "-", state_of(found), age_of(found.time),
        found.bytes,
        fmt::format("{}: {}{}", found.path.string(), found.kind, found.newest ? ", newest" : ""));
    if (!found.problem.empty()) fmt::print("{:>12}{}\n", "", escaped(found.problem));
  }
  if (foreign.empty() && newest == entries.rend())
    fmt::print("{} holds no committed checkpoint\n", escaped(options.path));
  return code;
}

}  // namespace

Command add_checkpoint_list(CLI::App& parent) {
  const auto options = std::make_shared<ListCommand>();
  CLI::App* app = parent.add_subcommand(
      "list",
      "List checkpoints and leftover attempts by step: state, age, size, content; of other "
      "programs, too, judged by their metadata. Exit code 1: there are none");
  app->add_option("PATH", options->path, "A run, or a directory with checkpoints of any kind")
      ->required();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_list(*options); }};
}

}  // namespace tessera::tools
