#include <CLI/CLI.hpp>

#include "tools/tessera/command.h"

namespace tessera::tools {

Command add_data(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "data", "Train tokenizers, tokenize text, check token files, and show conversations");
  app->require_subcommand(1);
  const std::vector<Command> commands = {add_data_tokenize(*app),        add_data_commit(*app),
                                         add_data_inspect(*app),         add_data_verify(*app),
                                         add_data_train_tokenizer(*app), add_data_render(*app)};
  return {app, [commands] { return run_parsed(commands); }};
}

}  // namespace tessera::tools
