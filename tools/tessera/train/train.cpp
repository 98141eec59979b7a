#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/authentication.h"
#include "core/base/error.h"
#include "tools/tessera/command.h"
#include "tools/tessera/config/fields.h"
#include "tools/tessera/config/load.h"
#include "tools/tessera/launch/restarts.h"
#include "tools/tessera/signal/stop_signal.h"
#include "tools/tessera/train/checkpoints.h"
#include "tools/tessera/train/resume.h"
#include "tools/tessera/train/run.h"

namespace tessera::tools {
namespace {

struct Options {
  int nproc = 0;
  int restarts = 0, min_nproc = 0;
  comm::LaunchFlags flags;
  bool json = false;
};

RestartOptions restart_options(const Options& options, const Config& config,
                               const std::vector<std::string>& arguments) {
  RestartOptions restarts;
  restarts.restarts = options.restarts;
  restarts.min_nproc = options.min_nproc;
  restarts.fits = [config](int nproc) {
    Config other = config;
    try {
      other.validate(nproc);
      return true;
    } catch (const InvalidArgument&) {
      return false;
    }
  };
  restarts.newest_step = [directory = config.run.out] { return train::newest_step(directory); };
  // A restart resumes from the run's own newest checkpoint, if any.
  restarts.arguments = [config, arguments](bool has_checkpoint) {
    std::vector<std::string> again = arguments;
    if (has_checkpoint || config.checkpoint.resume == "never")
      again.emplace_back("--checkpoint.resume=auto");
    return again;
  };
  return restarts;
}

int run(const Options& options, const std::vector<std::string>& words) {
  const comm::Variables variables = comm::process_environment();
  comm::LaunchEnvironment environment = comm::detect_launch(variables, options.flags);

  // Parse before ranks start, so that an error is reported once.
  Config config = load_config(parse_train_arguments(words), tessera_environment());
  const bool is_rank = environment.launcher != comm::Launcher::None;
  const bool launches = options.nproc > 0 && !is_rank;
  require(launches || (options.restarts == 0 && options.min_nproc == 0),
          "--restarts and --min-nproc need --nproc; another launcher has its own restarts");
  require(options.min_nproc <= options.nproc, "--min-nproc is {}, more than --nproc {}",
          options.min_nproc, options.nproc);
  require(options.min_nproc == 0 || options.restarts > 0, "--min-nproc needs --restarts N");
  Config checked = config;
  checked.model = {};  // may come from a checkpoint, which only the ranks open
  checked.model.init_from = config.model.init_from;
  const Config unchecked = checked;  // a copy, because validate() resolves micro_batch
  checked.validate(launches ? options.nproc : environment.world_size);
  if (launches) {
    std::vector<std::string> arguments = {"tessera", "train"};
    if (options.json) arguments.emplace_back("--json");
    arguments.insert(arguments.end(), words.begin(), words.end());
    // Refuse an existing run before the first start: a restart runs with resume=auto and would
    // resume it despite resume=never.
    if (options.restarts > 0 && config.checkpoint.resume == "never") {
      std::map<std::filesystem::path, std::string> unusable;
      std::vector<std::string> notes;
      find_resume(config.run.out, config.checkpoint.resume, unusable, notes);
    }
    // A late SIGUSR1 must not change the exit code of this process.
    mask_warnings(SIG_BLOCK);
    LaunchOptions launch;
    launch.heartbeat_timeout = to_milliseconds(config.comm.heartbeat_timeout);
    return launch_with_restarts(options.nproc, arguments,
                                restart_options(options, unchecked, arguments), launch);
  }
  require(options.nproc <= 1 || environment.launcher == comm::Launcher::Tessera,
          "--nproc starts ranks here, but this process already is a rank ({}); leave --nproc out",
          environment.describe());
  environment.bind = config.comm.bind;
  environment.token = comm::read_token(variables);
  // Keep the token from child processes. There are no other threads yet.
  ::unsetenv("TESSERA_TOKEN");     // NOLINT(concurrency-mt-unsafe)
  ::unsetenv("TESSERA_TOKEN_FD");  // NOLINT(concurrency-mt-unsafe)
  return run_rank(std::move(config), environment, options.json);
}

}  // namespace

Command add_train(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("train", "Train a GPT on one rank or many");
  app->footer(config_help());
  app->allow_extras();
  app->add_option("--nproc", options->nproc, "Number of ranks to start on this machine")
      ->check(CLI::Range(1, 4096));
  app->add_option(
         "--restarts", options->restarts,
         "With --nproc: after a failure restart all ranks from the newest checkpoint, at most "
         "this many times")
      ->check(CLI::Range(0, 1'000'000));
  app->add_option(
         "--min-nproc", options->min_nproc,
         "With --restarts: if a rank fails twice without a checkpoint in between, continue "
         "with fewer ranks, at least this many")
      ->check(CLI::Range(1, 4096));
  app->add_option("--rank", options->flags.rank, "Rank of this process, without a launcher");
  app->add_option("--world-size", options->flags.world_size, "Number of ranks");
  app->add_option("--local-rank", options->flags.local_rank, "Rank of this process on its host");
  app->add_option(
      "--rdzv", options->flags.rendezvous,
      "host:port where rank 0 serves the rendezvous; beyond loopback all ranks need the "
      "same secret in TESSERA_TOKEN (or readable from the descriptor TESSERA_TOKEN_FD)");
  app->add_flag("--json", options->json, "End with a JSON summary on standard output");
  return {app, [options, app] { return run(*options, app->remaining()); }};
}

}  // namespace tessera::tools
