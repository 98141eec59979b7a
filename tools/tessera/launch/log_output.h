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
  /// So much is kept that who copies from elsewhere should wait, or drop what is old.
  bool is_full() const;
  /// Drops half of what is kept, its oldest lines, and says so in their place.
  void drop_oldest();
  /// Waits until all is written, until nothing is taken for so long, or `most`. @return whether it
  /// is
  bool wait(std::chrono::milliseconds patience, std::chrono::milliseconds most);
  /// The same; what is left is dropped.
  void finish(std::chrono::milliseconds patience = std::chrono::seconds(10),
              std::chrono::milliseconds most = std::chrono::seconds(60));

 private:
  enum class Kind { Plain, Polled, Socket, Own };
  ssize_t write_some(std::string_view text) const;
  std::size_t kept() const;

  const int fd_;
  comm::FileDescriptor own_;  // the same file, opened once more, not to wait
  Kind kind_ = Kind::Plain;
  mutable std::mutex mutex_;
  std::string kept_;
  std::size_t dropped_ = 0;  // bytes, in all
  std::string note_;         // that says so
};

}  // namespace tessera::tools
