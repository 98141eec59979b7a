#include <string>
#include <vector>

#include "core/base/error.h"
#include "tools/tessera/command.h"
#include "tools/tessera/config/fields.h"
#include "tools/tessera/config/load.h"
#include "tools/tessera/launch/launcher.h"
#include "tools/tessera/train/run.h"

namespace tessera::tools {
namespace {

struct Options {
  int nproc = 0;
  int rank = -1, world_size = -1, local_rank = -1;
  std::string rendezvous;
  bool json = false;
};

int run(const Options& options, const std::vector<std::string>& words) {
  comm::LaunchFlags flags;
  const auto given = [](int value) { return value < 0 ? std::nullopt : std::optional<int>(value); };
  flags.rank = given(options.rank);
  flags.world_size = given(options.world_size);
  flags.local_rank = given(options.local_rank);
  flags.rendezvous = options.rendezvous;
  const comm::LaunchEnvironment environment =
      comm::detect_launch(comm::process_environment(), flags);

  // Parsed before ranks are started, so that a mistake is told once and at once.
  Config config = load_config(parse_train_arguments(words), tessera_environment());
  const bool is_rank = environment.launcher != comm::Launcher::None;
  const bool launches = options.nproc > 0 && !is_rank;
  Config checked = config;
  checked.model = {};  // parts of it may come from a checkpoint, which only ranks open
  checked.validate(launches ? options.nproc : environment.world_size);
  if (launches) {
    std::vector<std::string> arguments = {"tessera", "train"};
    if (options.json) arguments.emplace_back("--json");
    arguments.insert(arguments.end(), words.begin(), words.end());
    return launch(options.nproc, arguments);
  }
  require(options.nproc <= 1 || environment.launcher == comm::Launcher::Tessera,
          "--nproc starts ranks here, but this process is a rank already ({}); leave it out",
          environment.describe());
  return run_rank(std::move(config), environment, options.json);
}

}  // namespace

Command add_train(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("train", "Train a GPT on one rank or many");
  app->footer(config_help());
  app->allow_extras();
  app->add_option("--nproc", options->nproc, "Start this many ranks on this machine")
      ->check(CLI::Range(1, 4096));
  app->add_option("--rank", options->rank, "This process's rank, if no launcher tells it");
  app->add_option("--world-size", options->world_size, "Number of ranks");
  app->add_option("--local-rank", options->local_rank, "Rank among those of this host");
  app->add_option("--rdzv", options->rendezvous, "host:port where rank 0 serves the rendezvous");
  app->add_flag("--json", options->json, "Print a summary as JSON on standard output at the end");
  return {app, [options, app] { return run(*options, app->remaining()); }};
}

}  // namespace tessera::tools
