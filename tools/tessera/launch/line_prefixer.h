#pragma once

#include <string>

#include "comm/control/socket.h"
#include "tools/tessera/launch/log_output.h"

namespace tessera::tools {

/// Copies a pipe to a log and prefixes each line. One write per line, so that lines of several
/// ranks do not mix.
class LinePrefixer {
 public:
  /// @param from  non-blocking
  LinePrefixer(comm::FileDescriptor from, LogOutput& to, std::string prefix);
  /// -1 at the end of the stream.
  int fd() const { return from_.get(); }
  /// Copies at most 64 KiB without blocking; at the end of the stream also an unfinished line.
  void pump();
  /// Writes the rest of an unfinished line.
  void finish();

 private:
  void write_line(std::string_view line) const;
  comm::FileDescriptor from_;
  LogOutput& to_;
  const std::string prefix_;
  std::string partial_;
};

}  // namespace tessera::tools
