#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tessera::tools {

/// A subcommand. `run` is called after parsing and returns the exit code or throws; only main()
/// prints errors.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

// Defined in tools/tessera/<name>/<name>.cpp.
Command add_train(CLI::App& parent);
Command add_generate(CLI::App& parent);
Command add_eval(CLI::App& parent);
Command add_consolidate(CLI::App& parent);
Command add_checkpoint(CLI::App& parent);
Command add_doctor(CLI::App& parent);
Command add_run_report(CLI::App& parent);

}  // namespace tessera::tools
