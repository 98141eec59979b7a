#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/control/socket.h"

namespace tessera::tools {

/// Writes to a descriptor that may be slow or unread, from threads that must not block: keeps text
/// that can't be written at once. Thread-safe.
class LogOutput {
 public:
  /// @param fd  outlives this; its flags, shared with other processes, are not changed
  explicit LogOutput(int fd);
  /// Does not block, except on files. Lines of up to PIPE_BUF bytes stay whole beside other writers
  /// of the same pipe. Drops text once writing fails.
  /// @param text  whole lines
  void write(std::string_view text);
  /// Writes kept text as far as possible.
  void flush() { write({}); }
  /// Descriptor to poll for writing; -1 if nothing is kept.
  int fd() const;
  /// So much is kept that callers should stop copying, or drop_oldest().
  bool is_full() const;
  /// Replaces the older half of the kept lines by a warning.
  void drop_oldest();
  /// Waits until all is written, nothing is taken for `patience`, or `most` has passed.
  /// @return whether all is written
  bool wait(std::chrono::milliseconds patience, std::chrono::milliseconds most);
  /// The same; drops the rest.
  void finish(std::chrono::milliseconds patience = std::chrono::seconds(10),
              std::chrono::milliseconds most = std::chrono::seconds(60));

 private:
  enum class Kind { Plain, Polled, Socket, Own };
  ssize_t write_some(std::string_view text) const;
  std::size_t kept() const;

  const int fd_;
  comm::FileDescriptor own_;  // the same file, opened again without blocking
  Kind kind_ = Kind::Plain;
  mutable std::mutex mutex_;
  std::string kept_;
  std::size_t dropped_ = 0;  // bytes, in all
  std::string note_;         // the warning
};

}  // namespace tessera::tools
