#include <CLI/CLI.hpp>

#include "tools/tessera/command.h"

namespace tessera::tools {

Command add_data(CLI::App& parent) {
  CLI::App* app =
      parent.add_subcommand("data", "Train tokenizers, tokenize text, and show conversations");
  app->require_subcommand(1);
  const std::vector<Command> commands = {add_data_render(*app), add_data_tokenize(*app),
                                         add_data_train_tokenizer(*app)};
  return {app, [commands] { return run_parsed(commands); }};
}

}  // namespace tessera::tools
