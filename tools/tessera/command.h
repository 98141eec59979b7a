#pragma once

#include <functional>
#include <vector>

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

/// Runs the command that the command line names.
int run_parsed(const std::vector<Command>& commands);

/// Exit codes of all commands. A rank that lost other ranks exits with kCommunication.
inline constexpr int kFailed = 1, kUsage = 2, kIo = 3, kCommunication = 4, kMemory = 5;

// Defined in tools/tessera/<name>/<name>.cpp.
Command add_train(CLI::App& parent);
Command add_generate(CLI::App& parent);
Command add_eval(CLI::App& parent);
Command add_consolidate(CLI::App& parent);
Command add_checkpoint(CLI::App& parent);
Command add_doctor(CLI::App& parent);
Command add_plan(CLI::App& parent);
Command add_plot(CLI::App& parent);
Command add_models(CLI::App& parent);
Command add_run(CLI::App& parent);
Command add_run_report(CLI::App& parent);
Command add_data(CLI::App& parent);
Command add_serve(CLI::App& parent);

// The commands of `data`, in tools/tessera/data/.
Command add_data_commit(CLI::App& parent);
Command add_data_inspect(CLI::App& parent);
Command add_data_render(CLI::App& parent);
Command add_data_tokenize(CLI::App& parent);
Command add_data_train_tokenizer(CLI::App& parent);
Command add_data_verify(CLI::App& parent);

// The commands of `checkpoint`, in tools/tessera/checkpoint/.
Command add_checkpoint_list(CLI::App& parent);
Command add_checkpoint_inspect(CLI::App& parent);
Command add_checkpoint_verify(CLI::App& parent);
Command add_checkpoint_diff(CLI::App& parent);
Command add_checkpoint_reshard(CLI::App& parent);
Command add_checkpoint_seal(CLI::App& parent);
inline constexpr const char* kOneCheckpoint = "A checkpoint, or a run (its newest checkpoint)";
inline constexpr const char* kAnyCheckpoint =
    "A checkpoint, a run (its newest checkpoint), or anything else that consolidate reads";
inline constexpr const char* kWeightsOption = "--weights";
inline constexpr const char* kWeightsHelp =
    "trained, or ema: the moving average of the weights that a run with optim.ema keeps";

}  // namespace tessera::tools
