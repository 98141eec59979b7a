#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/control/socket.h"

namespace tessera::tools {

/// Text for a descriptor that may be slow, or that nobody reads, from threads that must not wait
/// for it: what does not go at once is kept. Thread-safe.
class LogOutput {
 public:
  /// @param fd  must outlive this; its flags, which other processes share, stay as they are
  explicit LogOutput(int fd);
  /// Never waits, if the system has a way to: it has none for files. Other writers of the same pipe
  /// don't break into a line of up to PIPE_BUF bytes. Once writing fails (nobody will ever read
  /// it), text is dropped.
  /// @param text  whole lines
  void write(std::string_view text);
  /// Writes what goes now.
  void flush() { write({}); }
  /// To be polled for writing; -1 if nothing is kept.
  int fd() const;
  /// So much is kept that who copies from elsewhere should wait.
  bool is_full() const;
  /// Waits until all is written; once nothing is taken for so long, or after a minute, the rest is
  /// dropped.
  void finish(std::chrono::milliseconds patience = std::chrono::seconds(10));

 private:
  enum class Kind { Plain, Polled, Socket, Own };
  ssize_t write_some(std::string_view text) const;
  std::size_t kept() const;

  const int fd_;
  comm::FileDescriptor own_;  // the same file, opened once more, not to wait
  Kind kind_ = Kind::Plain;
  mutable std::mutex mutex_;
  std::string kept_;
};

}  // namespace tessera::tools
