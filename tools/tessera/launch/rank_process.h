#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "tools/tessera/command.h"
#include "tools/tessera/launch/line_prefixer.h"
#include "tools/tessera/launch/log_output.h"

namespace tessera::tools {

struct RankCommand {
  std::string program;
  std::vector<std::string> arguments;    ///< argv[0] included
  std::vector<std::string> environment;  ///< "NAME=value"
  sigset_t mask;
};

/// A rank as a child process, which dies with this process.
class RankProcess {
 public:
  /// Starts the process. Rank 0 inherits standard output and error; the output of other ranks is
  /// copied to `log` by pump(), each line prefixed with "[rank N] ".
  /// @throws IoError
  RankProcess(int rank, RankCommand command, LogOutput& log);

  pid_t pid() const { return pid_; }
  bool running() const { return running_; }
  void signal(int number) const;
  void kill_expected();
  bool is_expected_to_end() const { return is_expected_to_end_; }
  /// @return the waitpid() status, once, after the process has ended
  std::optional<int> reap();

  /// Descriptor to poll for output; -1: none.
  int output() const { return output_ ? output_->fd() : -1; }
  void pump();
  void finish_output();

 private:
  pid_t pid_ = -1;
  bool running_ = true;
  bool is_expected_to_end_ = false;
  std::optional<LinePrefixer> output_;
};

/// "was killed by SIGKILL", "exited with code 3"
std::string describe_end(int status);
/// "SIGKILL", "exit code 3"
std::string short_end(int status);
/// "SIGTERM"
std::string signal_name(int signal);

}  // namespace tessera::tools
