#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "core/base/memory.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/verify.h"
#include "tools/tessera/checkpoint/describe.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

struct Options {
  std::string path;
  bool json = false;
};

int list(const Options& options) {
  const auto entries = io::find_checkpoints(options.path);
  io::Json json = io::Json::array();
  for (const io::CheckpointEntry& entry : entries) {
    io::Json row{{"path", entry.path.string()}, {"step", entry.step}, {"problem", nullptr}};
    try {
      const auto reader = io::CheckpointReader::open(entry.path);
      row["world_size"] = reader.index().world_size;
      row["sections"] = section_names(reader.index());
      row["created"] = reader.index().created;
      row["bytes"] = stored_bytes(reader.index());
    } catch (const Error& error) {
      row["problem"] = error.what();
    }
    json.push_back(std::move(row));
  }
  if (options.json) {
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  if (json.empty()) fmt::print("{} holds no committed checkpoint\n", options.path);
  for (const io::Json& row : json) {
    if (row["problem"].is_string()) {
      fmt::print("{:>10}  broken: {}\n", row["step"].get<std::int64_t>(),
                 row["problem"].get<std::string>());
      continue;
    }
    fmt::print("{:>10}  {}  {:>10}  {} rank{}  {}\n", row["step"].get<std::int64_t>(),
               row["created"].get<std::string>(), format_bytes(row["bytes"].get<std::int64_t>()),
               row["world_size"].get<int>(), row["world_size"] == 1 ? "" : "s",
               fmt::join(row["sections"].get<std::vector<std::string>>(), ", "));
  }
  return 0;
}

int inspect(const Options& options) {
  const auto reader = io::open_checkpoint(options.path);
  const io::Json json = describe_checkpoint(reader);
  if (options.json) {
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  const io::CheckpointIndex& index = reader.index();
  fmt::print(
      "{}", format_rows(
                detect_console(STDOUT_FILENO),
                {{"checkpoint", reader.path().string()},
                 {"step", std::to_string(index.step)},
                 {"run", index.run_id},
                 {"created", fmt::format("{} by tessera {}", index.created, index.tessera_version)},
                 {"ranks", std::to_string(index.world_size)},
                 {"sections", fmt::format("{}", fmt::join(section_names(index), ", "))},
                 {"stored", format_bytes(stored_bytes(index))},
                 {"parameters", format_count(static_cast<double>(parameter_count(index)))},
                 {"digest", json["digest"].is_string() ? json["digest"].get<std::string>()
                                                       : "none (no model section)"},
                 {"model", index.model_config.dump()}}));
  if (index.model) {
    fmt::print("\n");
    for (const auto& [name, tensor] : *index.model) {
      fmt::print("  {:<32} {:<5} {:<16} {} chunk{}\n", name, tensor.dtype, tensor.shape.str(),
                 tensor.chunks.size(), tensor.chunks.size() == 1 ? "" : "s");
    }
  }
  return 0;
}

int verify(const Options& options) {
  io::VerifyReport report;
  std::string path = options.path;
  try {
    const auto reader = io::open_checkpoint(options.path);
    path = reader.path().string();
    report = io::verify_checkpoint(reader);
  } catch (const io::CorruptFile& error) {
    report.problems.push_back({error.file(), "", 0, 0, error.what()});
  } catch (const CorruptCheckpoint& error) {  // so broken that it cannot be opened: also a finding
    report.problems.push_back({"index.json", "", 0, 0, error.what()});
  }
  const bool good = report.problems.empty();
  if (options.json) {
    io::Json problems = io::Json::array();
    for (const io::VerifyProblem& problem : report.problems) {
      problems.push_back({{"file", problem.file},
                          {"tensor", problem.tensor},
                          {"elements", {problem.begin, problem.end}},
                          {"problem", problem.what}});
    }
    const io::Json json{{"path", path},
                        {"valid", good},
                        {"tensors", report.tensors},
                        {"bytes", report.bytes},
                        {"problems", std::move(problems)}};
    fmt::print("{}\n", json.dump(2));
    return good ? 0 : 1;
  }
  for (const io::VerifyProblem& problem : report.problems) fmt::print("{}\n", problem.str());
  fmt::print("{}: {} tensors, {} read, {}\n", path, report.tensors, format_bytes(report.bytes),
             good ? "complete, checksums right, values finite"
                  : fmt::format("{} problem{}", report.problems.size(),
                                report.problems.size() == 1 ? "" : "s"));
  return good ? 0 : 1;
}

}  // namespace

Command add_checkpoint(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("checkpoint", "List, inspect and verify checkpoints");
  app->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, const char* path) {
    CLI::App* command = app->add_subcommand(name, what);
    command->add_option("PATH", options->path, path)->required();
    command->add_flag("--json", options->json, "Machine-readable output");
    return command;
  };
  const char* const one = "A checkpoint, or a run (its newest checkpoint)";
  const CLI::App* listing =
      add("list", "Committed checkpoints, oldest first", "A run, or a directory of checkpoints");
  const CLI::App* inspection = add("inspect", "Step, sections, tensors and digest", one);
  add("verify", "Read everything: checksums and finite values; exit 1 if something is wrong", one);
  return {app, [options, listing, inspection] {
            if (listing->parsed()) return list(*options);
            if (inspection->parsed()) return inspect(*options);
            return verify(*options);
          }};
}

}  // namespace tessera::tools
