#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>
#include <string>

#include "io/base/json.h"
#include "tools/tessera/command.h"
#include "tools/tessera/run_report/render.h"

namespace tessera::tools {
namespace {

struct Options {
  std::string directory;
  bool json = false;
};

int run(const Options& options) {
  const RunEvidence evidence = gather_evidence(options.directory);
  const std::int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                               std::chrono::system_clock::now().time_since_epoch())
                               .count();
  const Verdict verdict = judge_run(evidence.ranks, now);
  if (options.json) {
    fmt::print("{}\n", io::dump_json(render_json(evidence, verdict, now)));
  } else {
    fmt::print("{}", render_text(evidence, verdict, now, detect_console(STDOUT_FILENO)));
  }
  return 0;
}

}  // namespace

Command add_run_report(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand(
      "run-report", "Explain why a run failed, or that it runs: which rank, where, and what to do");
  app->add_option("DIR", options->directory, "The run's directory (--run.out)")->required();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run(*options); }};
}

}  // namespace tessera::tools
