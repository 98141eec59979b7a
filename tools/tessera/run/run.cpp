#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "comm/control/launch_environment.h"
#include "core/base/error.h"
#include "tools/tessera/command.h"
#include "tools/tessera/launch/launcher.h"

namespace tessera::tools {
namespace {

// The file that a shell would execute for a command.
std::string find_program(const std::string& name) {
  const auto is_program = [](const std::string& path) {
    std::error_code error;
    return std::filesystem::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
  };
  require(!name.empty(), "the name of the program is empty");
  std::string found = name;
  if (name.find('/') == std::string::npos) {
    const char* const path = std::getenv("PATH");
    std::istringstream folders(path == nullptr ? "" : path);
    for (std::string folder; std::getline(folders, folder, ':');) {
      found = (folder.empty() ? "." : folder) + "/" + name;
      if (is_program(found)) return found;
    }
    throw InvalidArgument("no program {} in PATH; give its path, such as ./{}", name, name);
  }
  require(is_program(found), "{} is not an executable file", found);
  return found;
}

int run(int nproc, const std::vector<std::string>& command) {
  const comm::Variables variables = comm::process_environment();
  const comm::LaunchEnvironment environment = comm::detect_launch(variables);
  require(environment.launcher == comm::Launcher::None,
          "this process already is a rank ({}); start the program itself", environment.describe());
  LaunchOptions options;
  options.program = find_program(command.front());
  options.blocks_warnings = false;
  options.stop_together = false;
  return launch(nproc, command, options).code;
}

}  // namespace

Command add_run(CLI::App& parent) {
  const auto nproc = std::make_shared<int>(1);
  CLI::App* app = parent.add_subcommand("run", "Start your own program as ranks on this machine");
  app->footer(
      "tessera run --nproc N PROGRAM [ARGUMENT...]\n"
      "The program joins the other ranks by train::join() or train::run(); see docs/embedding.md.\n"
      "A script around it must exec it, because signals are sent to the rank's process alone.");
  app->add_option("--nproc", *nproc, "Number of ranks")->check(CLI::Range(1, 4096))->required();
  app->prefix_command();  // the rest is the program's
  return {app, [nproc, app] {
            const std::vector<std::string> command = app->remaining();
            require(!command.empty(),
                    "no program; give it after the options: tessera run --nproc "
                    "{} PROGRAM [ARGUMENT...]",
                    *nproc);
            return run(*nproc, command);
          }};
}

}  // namespace tessera::tools
