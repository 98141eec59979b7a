#include <CLI/CLI.hpp>

#include "core/base/error.h"
#include "tools/tessera/command.h"

namespace tessera::tools {

int run_parsed(const std::vector<Command>& commands) {
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  throw InternalError("no command ran");
}

Command add_checkpoint(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "checkpoint", "List, inspect, verify, compare, seal and reshard checkpoints; needs no GPU");
  app->footer(
      "Examples:\n"
      "  tessera checkpoint list runs/            checkpoints of any program below a directory\n"
      "  tessera checkpoint inspect runs/a        tensors and settings of a run's newest one\n"
      "  tessera checkpoint verify global_step500 all data, against checksums\n"
      "  tessera checkpoint diff before after     which tensors differ, and by how much");
  app->require_subcommand(1);
  const std::vector<Command> commands = {add_checkpoint_list(*app),   add_checkpoint_inspect(*app),
                                         add_checkpoint_verify(*app), add_checkpoint_diff(*app),
                                         add_checkpoint_seal(*app),   add_checkpoint_reshard(*app)};
  return {app, [commands] { return run_parsed(commands); }};
}

}  // namespace tessera::tools
