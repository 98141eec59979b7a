#include "io/checkpoint/verify.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/memory.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/source/open_sharded.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {
namespace {

struct VerifyCommand {
  std::string path, step = "latest";
  int jobs = 1;
  bool json = false;
};

// Reports a checkpoint that cannot be opened as a problem instead of throwing.
io::VerifyReport examine(const io::fs::path& dir, const io::VerifyOptions& options,
                         std::optional<std::int64_t> step) {
  const auto check_step = [&](const io::CheckpointIndex& index) {
    require(!step || *step == index.step, "{} is the checkpoint of step {}, not of {}",
            dir.string(), index.step, step.value_or(0));
  };
  try {
    const auto reader = io::CheckpointReader::open(dir);
    check_step(reader.index());
    return io::verify_checkpoint(reader, options);
  } catch (const io::CorruptFile&) {
    // The index is valid, but a file is missing or truncated: verify the others.
    const std::string source = (dir / "index.json").string();
    const auto index =
        io::parse_index(io::read_file(source, io::kMaxIndexBytes, io::Links::Refuse), source);
    check_step(index);
    return io::verify_checkpoint(dir, index, options);
  } catch (const CorruptCheckpoint& error) {
    io::VerifyProblem problem{"index.json", "", 0, 0, error.what()};
    if (const auto* tensor = dynamic_cast<const io::CorruptTensor*>(&error))
      problem = {"index.json", tensor->tensor(), tensor->begin(), tensor->end(), error.what()};
    io::VerifyReport report;
    report.problems.push_back(std::move(problem));
    return report;
  }
}

// Verifies shards of another program, by their own checksums. Their values may be infinite, such as
// the best loss so far.
io::VerifyReport examine_shards(const VerifyCommand& command, io::VerifyOptions options) {
  require(command.step == "latest", "{} is not a tessera checkpoint and has no step {}",
          command.path, command.step);
  try {
    const auto source = io::open_sharded(command.path);
    std::vector<std::string> names;
    for (const io::TensorInfo& info : source->tensors()) names.push_back(info.name);
    for (const auto& other : source->unreadable())
      if (other.carrier) names.push_back(other.name);
    options.check_finite = false;
    return io::verify_tensors(*source, names, options);
  } catch (const CorruptCheckpoint& error) {
    io::VerifyReport report;
    report.problems.push_back({command.path, "", 0, 0, error.what()});
    return report;
  }
}

void print_json(const std::string& path, const io::VerifyReport& report) {
  io::Json problems = io::Json::array();
  for (const io::VerifyProblem& problem : report.problems) {
    problems.push_back({{"file", problem.file},
                        {"tensor", problem.tensor},
                        {"elements", {problem.begin, problem.end}},
                        {"bytes", {problem.byte_begin, problem.byte_end}},
                        {"problem", problem.what}});
  }
  const io::Json json{{"path", path},
                      {"valid", report.problems.empty()},
                      {"tensors", report.tensors},
                      {"bytes", report.bytes},
                      {"unverifiable_bytes", report.unverifiable},
                      {"problems", std::move(problems)}};
  fmt::print("{}\n", io::dump_json(json));
}

int run_verify(const VerifyCommand& options) {
  require(options.jobs >= 1, "--jobs {}: expected at least 1", options.jobs);
  const bool is_foreign = io::is_sharded(options.path);
  if (!is_foreign) io::refuse_parent_of_shards(options.path);
  const auto step = is_foreign ? std::nullopt : parse_step(options.path, options.step);
  const io::fs::path path =
      is_foreign ? io::fs::path(options.path) : io::locate_checkpoint(options.path, step);
  ByteProgress progress("read");
  io::VerifyOptions verify;
  verify.threads = options.jobs;
  verify.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const io::VerifyReport report =
      is_foreign ? examine_shards(options, verify) : examine(path, verify, step);
  const bool good = report.problems.empty();
  if (options.json) {
    print_json(path.string(), report);
    return good ? 0 : 1;
  }
  for (const io::VerifyProblem& problem : report.problems)
    fmt::print("{}\n", escaped(problem.str()));
  const std::string unverifiable =
      report.unverifiable == 0
          ? ""
          : fmt::format(" ({} have none: not verifiable)", format_bytes(report.unverifiable));
  fmt::print("{}: {} tensors, {} read, {}\n", path.string(), report.tensors,
             format_bytes(report.bytes),
             good ? fmt::format("complete, checksums right{}{}", unverifiable,
                                is_foreign ? "" : ", values finite")
                  : counted(std::ssize(report.problems), "problem"));
  return good ? 0 : 1;
}

}  // namespace

Command add_checkpoint_verify(CLI::App& parent) {
  const auto options = std::make_shared<VerifyCommand>();
  options->jobs = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  CLI::App* app = parent.add_subcommand(
      "verify",
      "Read everything and check coverage, checksums and finite values; exit 1 and name file, "
      "tensor and bytes of any damage. Shards of other programs, too, by the checksums that they "
      "have");
  app->add_option("PATH", options->path, kOneCheckpoint)->required();
  app->add_option("--step", options->step, kStepHelp)->capture_default_str();
  app->add_option("--jobs", options->jobs, "Threads that read, with 1 MiB of memory each")
      ->capture_default_str();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_verify(*options); }};
}

}  // namespace tessera::tools
