#include "io/checkpoint/verify.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/base/memory.h"
#include "core/base/processors.h"
#include "io/base/json.h"
#include "io/seal/verify_path.h"
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

void print_json(const io::PathReport& found) {
  const io::VerifyReport& report = found.verify;
  io::Json problems = io::Json::array();
  for (const io::VerifyProblem& problem : report.problems) {
    problems.push_back({{"file", problem.file},
                        {"tensor", problem.tensor},
                        {"elements", {problem.begin, problem.end}},
                        {"bytes", {problem.byte_begin, problem.byte_end}},
                        {"problem", problem.what}});
  }
  const io::Json json{{"path", found.path.string()},
                      {"valid", report.problems.empty()},
                      {"tensors", report.tensors},
                      {"bytes", report.bytes},
                      {"unverifiable_bytes", report.unverifiable},
                      {"sealed", found.sealed.empty() ? io::Json() : io::Json(found.sealed)},
                      {"additional_files", found.additional},
                      {"note", found.unread.empty() ? io::Json() : io::Json(found.unread)},
                      {"problems", std::move(problems)}};
  fmt::print("{}\n", io::dump_json(json));
}

int run_verify(const VerifyCommand& options) {
  require(options.jobs >= 1, "--jobs {}: expected at least 1", options.jobs);
  const bool is_foreign = io::is_foreign_or_sealed(options.path);
  require(!is_foreign || options.step == "latest",
          "{} is not a tessera checkpoint and has no step {}", options.path, options.step);
  if (!is_foreign) io::refuse_parent_of_shards(options.path);
  ByteProgress progress("read");
  io::VerifyOptions verify;
  verify.threads = options.jobs;
  verify.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const io::PathReport found = io::verify_path(
      options.path, is_foreign ? std::nullopt : parse_step(options.path, options.step), verify);
  const io::VerifyReport& report = found.verify;
  const bool good = report.problems.empty();
  if (options.json) {
    print_json(found);
    return good ? 0 : 1;
  }
  for (const io::VerifyProblem& problem : report.problems)
    fmt::print("{}\n", escaped(problem.str()));
  for (const std::string& name : found.additional)
    fmt::print("note: {} is not in the seal\n", escaped(name));
  if (!found.unread.empty()) fmt::print("note: {}\n", escaped(found.unread));
  const std::string sealed =
      found.sealed.empty() ? "" : fmt::format(", as sealed on {}", escaped(found.sealed));
  fmt::print("{}: {} tensors, {} read, {}\n", escaped(found.path.string()), report.tensors,
             format_bytes(report.bytes),
             good ? fmt::format("complete{}{}{}",
                                report.unverifiable < report.bytes ? ", checksums right" : "",
                                sealed, is_foreign ? "" : ", values finite")
                  : counted(std::ssize(report.problems), "problem"));
  if (report.unverifiable > 0)
    fmt::print("{} have no checksum; `tessera checkpoint seal {}{}` records {}\n",
               format_bytes(report.unverifiable), escaped(found.path.string()),
               found.sealed.empty() ? "" : " --overwrite",
               found.sealed.empty() ? "them" : "theirs");
  return good ? 0 : 1;
}

}  // namespace

Command add_checkpoint_verify(CLI::App& parent) {
  const auto options = std::make_shared<VerifyCommand>();
  options->jobs = std::min(usable_processors(), 8);
  CLI::App* app = parent.add_subcommand(
      "verify",
      "Read everything and check coverage, checksums and finite values; exit 1 and name file, "
      "tensor and bytes of any damage. Files of other programs, too, by the checksums that they "
      "have and by their seal");
  app->add_option("PATH", options->path, kAnyCheckpoint)->required();
  app->add_option("--step", options->step, kStepHelp)->capture_default_str();
  app->add_option("--jobs", options->jobs, "Threads that read, with 1 MiB of memory each")
      ->capture_default_str();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_verify(*options); }};
}

}  // namespace tessera::tools
