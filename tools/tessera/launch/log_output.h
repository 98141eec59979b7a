#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/control/socket.h"

namespace tessera::tools {

/// Writes to a slow or unread descriptor without blocking: buffers text that can't be written at
/// once. Thread-safe.
class LogOutput {
 public:
  /// @param fd  must outlive this; its flags are not changed, because other processes share them
  explicit LogOutput(int fd);
  /// Never blocks, except on files. Lines of up to PIPE_BUF bytes do not mix with those of other
  /// writers of the same pipe. Drops all text after a write error.
  /// @param text  whole lines
  void write(std::string_view text);
  void flush() { write({}); }
  /// Descriptor to poll for writing; -1 if nothing is buffered.
  int fd() const;
  /// True if 256 KiB or more are buffered; callers should then stop copying or call drop_oldest().
  bool is_full() const;
  /// Replaces the older half of the buffered lines by a warning.
  void drop_oldest();
  /// Waits until the buffer is empty, no progress is made for `patience`, or `most` has passed.
  /// @return whether the buffer is empty
  bool wait(std::chrono::milliseconds patience, std::chrono::milliseconds most);
  /// Calls wait(), then drops the text that is still buffered.
  void finish(std::chrono::milliseconds patience = std::chrono::seconds(10),
              std::chrono::milliseconds most = std::chrono::seconds(60));

 private:
  enum class Kind { Plain, Polled, Socket, Own };
  ssize_t write_some(std::string_view text) const;
  std::size_t kept() const;

  const int fd_;
  comm::FileDescriptor own_;  // the same file, reopened with O_NONBLOCK
  Kind kind_ = Kind::Plain;
  mutable std::mutex mutex_;
  std::string kept_;
  std::size_t dropped_ = 0;  // bytes, total
  std::string note_;         // the last warning about dropped bytes
};

}  // namespace tessera::tools
