#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tessera::tools {

/// A subcommand whose options are declared on `app`. `run`, called after parsing, returns the exit
/// code or throws; only main() prints errors and exits.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

// Each declared here, defined in tools/tessera/<name>/<name>.cpp.
Command add_train(CLI::App& parent);
Command add_generate(CLI::App& parent);
Command add_eval(CLI::App& parent);
Command add_consolidate(CLI::App& parent);
Command add_checkpoint(CLI::App& parent);
Command add_doctor(CLI::App& parent);
Command add_run_report(CLI::App& parent);

}  // namespace tessera::tools
