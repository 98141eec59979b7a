#pragma once

#include <fmt/format.h>
#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/control/socket.h"
#include "tools/tessera/command.h"
#include "tools/tessera/launch/log_output.h"

namespace tessera::tools {

/// Copies a pipe to a log and prefixes each line. Writes each line in one call, so that lines of
/// several ranks do not mix.
class LinePrefixer {
 public:
  /// @param from  non-blocking
  LinePrefixer(comm::FileDescriptor from, LogOutput& to, std::string prefix)
      : from_(std::move(from)), to_(to), prefix_(std::move(prefix)) {}
  /// Descriptor to poll for input; -1 at the end of the stream.
  int fd() const { return from_.get(); }
  /// Copies at most 64 KiB without blocking; at the end of the stream also an unfinished line.
  void pump();
  /// Writes the rest of an unfinished line.
  void finish();

 private:
  void write_line(std::string_view line) const { to_.write(fmt::format("{}{}\n", prefix_, line)); }
  comm::FileDescriptor from_;
  LogOutput& to_;
  const std::string prefix_;
  std::string partial_;
};

struct RankCommand {
  std::string program;
  std::vector<std::string> arguments;    ///< argv[0] included
  std::vector<std::string> environment;  ///< "NAME=value"
  sigset_t mask;
};

/// A rank as a child process, which is killed if this process dies.
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
  /// @return the waitpid() status at the first call after the process has ended; else empty
  std::optional<int> reap();

  /// Descriptor to poll for output; -1: none.
  int output() const { return output_ ? output_->fd() : -1; }
  void pump() {
    if (output_) output_->pump();
  }
  void finish_output() {
    if (output_) output_->finish();
  }

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
