#include "io/checkpoint/list.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/memory.h"
#include "io/base/json.h"
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

std::optional<std::int64_t> age_of(const io::ListedCheckpoint& entry) {
  if (!entry.time) return std::nullopt;
  return std::max<std::int64_t>(0, std::time(nullptr) - *entry.time);
}

io::Json to_json(const io::ListedCheckpoint& entry) {
  io::Json row{
      {"path", entry.path.string()}, {"step", entry.step},   {"state", io::state_name(entry.state)},
      {"problem", nullptr},          {"bytes", entry.bytes}, {"age_s", nullptr}};
  if (!entry.problem.empty()) row["problem"] = entry.problem;
  if (const auto age = age_of(entry)) row["age_s"] = *age;
  if (entry.index) {
    row["sections"] = entry.sections;
    row["world_size"] = entry.index->world_size;
    row["created"] = entry.index->created;
    row["run_id"] = entry.index->run_id;
  }
  return row;
}

std::string rough(std::int64_t seconds) {
  return seconds < 60 ? fmt::format("{} s", seconds)
                      : format_duration(static_cast<double>(seconds));
}

int run_list(const ListCommand& options) {
  const auto entries = io::list_checkpoints(options.path, [](const io::CheckpointReader& reader) {
    if (reader.index().trainer) train::read_trainer_state(reader);  // throws if invalid
  });
  if (options.json) {
    io::Json rows = io::Json::array();
    for (const io::ListedCheckpoint& entry : entries) rows.push_back(to_json(entry));
    fmt::print("{}\n", io::dump_json(rows));
    return 0;
  }
  const auto committed =
      std::ranges::count(entries, io::CheckpointState::Committed, &io::ListedCheckpoint::state);
  if (!entries.empty()) {
    fmt::print("{:>10}  {:<12}  {:>8}  {:>10}  {}\n", "step", "state", "age", "size", "what");
  }
  for (const io::ListedCheckpoint& entry : entries) {
    const auto age = age_of(entry);
    std::string what = escaped(entry.problem);
    if (entry.index) {
      what = fmt::format("{}, {}", fmt::join(entry.sections, ", "),
                         counted(entry.index->world_size, "rank"));
    }
    fmt::print("{:>10}  {:<12}  {:>8}  {:>10}  {}\n", entry.step, io::state_name(entry.state),
               age ? rough(*age) : "?", format_bytes(entry.bytes), what);
  }
  if (committed == 0) fmt::print("{} holds no committed checkpoint\n", options.path);
  return 0;
}

}  // namespace

Command add_checkpoint_list(CLI::App& parent) {
  const auto options = std::make_shared<ListCommand>();
  CLI::App* app = parent.add_subcommand(
      "list", "List checkpoints and leftover attempts by step: state, age, size, content");
  app->add_option("PATH", options->path, "A run, or a directory of checkpoints")->required();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_list(*options); }};
}

}  // namespace tessera::tools
