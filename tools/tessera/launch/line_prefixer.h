#pragma once

#include <string>

#include "comm/control/socket.h"
#include "tools/tessera/launch/log_output.h"

namespace tessera::tools {

/// Copies what comes from a pipe to a log, line by line, each with a prefix. A line is written in
/// one piece, so the lines of several ranks do not mix.
class LinePrefixer {
 public:
  /// @param from  non-blocking
  LinePrefixer(comm::FileDescriptor from, LogOutput& to, std::string prefix);
  /// -1 at the end of the stream.
  int fd() const { return from_.get(); }
  /// Copies what is there now, at most 64 KiB of it, however fast more comes; at the end of the
  /// stream also a last line without a newline.
  void pump();
  /// Writes what is left of a line.
  void finish();

 private:
  void write_line(std::string_view line) const;
  comm::FileDescriptor from_;
  LogOutput& to_;
  const std::string prefix_;
  std::string partial_;
};

}  // namespace tessera::tools
