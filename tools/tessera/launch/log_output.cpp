#include "tools/tessera/launch/log_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tessera::tools {
namespace {

constexpr std::size_t kFull = 256 * 1024;
constexpr std::size_t kAtOnce = 4096;  // fits, if a pipe is ready for writing

bool is_ready(int fd, int milliseconds) {
  pollfd polled{fd, POLLOUT, 0};
  return ::poll(&polled, 1, milliseconds) > 0;
}

}  // namespace

LogOutput::LogOutput(int fd) : fd_(fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return;
  if (S_ISSOCK(status.st_mode)) kind_ = Kind::Socket;
  if (!S_ISFIFO(status.st_mode) && !S_ISCHR(status.st_mode)) return;
  own_ = comm::FileDescriptor(::open(fmt::format("/proc/self/fd/{}", fd).c_str(),
                                     O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  kind_ = own_ ? Kind::Own : Kind::Polled;
}

// As write(2), with EAGAIN for what would have to wait.
ssize_t LogOutput::write_some(std::string_view text) const {
  switch (kind_) {
    case Kind::Own:
      return ::write(own_.get(), text.data(), text.size());
    case Kind::Socket:
      return ::send(fd_, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    case Kind::Polled:
      if (!is_ready(fd_, 0)) {
        errno = EAGAIN;
        return -1;
      }
      return ::write(fd_, text.data(), std::min(text.size(), kAtOnce));
    case Kind::Plain:
      break;
  }
  return ::write(fd_, text.data(), text.size());
}

void LogOutput::write(std::string_view text) {
  const std::lock_guard lock(mutex_);
  kept_ += text;
  std::string_view rest = kept_;
  while (!rest.empty()) {
    const ssize_t n = write_some(rest);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) rest = {};
    if (n >= 0) rest.remove_prefix(static_cast<std::size_t>(n));
  }
  kept_.erase(0, kept_.size() - rest.size());
}

int LogOutput::fd() const {
  const std::lock_guard lock(mutex_);
  return kept_.empty() ? -1 : own_ ? own_.get() : fd_;
}

bool LogOutput::is_full() const {
  const std::lock_guard lock(mutex_);
  return kept_.size() >= kFull;
}

void LogOutput::finish(std::chrono::milliseconds at_most) {
  const auto end = std::chrono::steady_clock::now() + at_most;
  for (flush(); fd() >= 0; flush()) {
    const int left = comm::milliseconds_until(end);
    if (left == 0) break;
    is_ready(fd(), left);
  }
  const std::lock_guard lock(mutex_);
  kept_.clear();
}

}  // namespace tessera::tools
