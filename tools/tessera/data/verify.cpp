#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/memory.h"
#include "core/base/processors.h"
#include "io/base/json.h"
#include "io/data/verify_tokens.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

struct VerifyTokensCommand {
  std::string path;
  int jobs = 1;
  bool json = false;
};

int run_verify_tokens(const VerifyTokensCommand& options) {
  ByteProgress progress("read");
  io::VerifyTokensOptions verify;
  verify.threads = options.jobs;
  verify.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const io::VerifyTokensReport report = io::verify_tokens(options.path, verify);
  const bool good = report.problems.empty();
  if (options.json) {
    io::Json problems = io::Json::array();
    for (const io::TokenProblem& problem : report.problems)
      problems.push_back({{"file", problem.file}, {"problem", problem.what}});
    fmt::print("{}\n", io::dump_json({{"path", options.path},
                                      {"valid", good},
                                      {"shards", report.shards},
                                      {"tokens", report.tokens},
                                      {"bytes", report.bytes},
                                      {"without_checksum", report.without_checksum},
                                      {"problems", std::move(problems)}}));
    return good ? 0 : kFailed;
  }
  for (const io::TokenProblem& problem : report.problems)
    fmt::print("{}: {}\n", escaped(problem.file), escaped(problem.what));
  fmt::print("{}: {}, {} tokens, {} read, {}\n", escaped(options.path),
             counted(report.shards, "shard"), report.tokens, format_bytes(report.bytes),
             !good                          ? counted(std::ssize(report.problems), "problem")
             : report.without_checksum == 0 ? "complete, checksums right"
                                            : "size right; it has no checksum");
  return good ? 0 : kFailed;
}

}  // namespace

Command add_data_verify(CLI::App& parent) {
  const auto options = std::make_shared<VerifyTokensCommand>();
  options->jobs = std::min(usable_processors(), 8);
  CLI::App* app = parent.add_subcommand(
      "verify",
      "Read all token shards and check sizes, checksums and ids against the vocabulary; exit 1 and "
      "name each damaged shard");
  app->add_option("PATH", options->path, "Directory of token shards, or a token file")->required();
  app->add_option("--jobs", options->jobs, "Threads that read, with 1 MiB of memory each")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_verify_tokens(*options); }};
}

}  // namespace tessera::tools
