#include "tools/tessera/launch/log_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace tessera::tools {
namespace {

constexpr std::size_t kFull = 256 * 1024;

// Whole lines that fit one atomic pipe write, or the beginning of a long line.
std::string_view piece_of(std::string_view text) {
  if (text.size() <= PIPE_BUF) return text;
  const std::size_t end = text.rfind('\n', PIPE_BUF - 1);
  return text.substr(0, end == text.npos ? PIPE_BUF : end + 1);
}

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

// Like write(2), but fails with EAGAIN instead of blocking.
ssize_t LogOutput::write_some(std::string_view text) const {
  if (kind_ == Kind::Socket)
    return ::send(fd_, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (kind_ == Kind::Polled && !is_ready(fd_, 0)) {
    errno = EAGAIN;
    return -1;
  }
  if (kind_ != Kind::Plain) text = piece_of(text);
  return ::write(own_ ? own_.get() : fd_, text.data(), text.size());
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

bool LogOutput::is_full() const { return kept() >= kFull; }

std::size_t LogOutput::kept() const {
  const std::lock_guard lock(mutex_);
  return kept_.size();
}

void LogOutput::drop_oldest() {
  const std::lock_guard lock(mutex_);
  // Keep the first line: a part of it may have been written.
  const std::size_t line = kept_.find('\n');
  const std::size_t begin = line == kept_.npos ? 0 : line + 1;
  const std::size_t half = kept_.find('\n', begin + (kept_.size() - begin) / 2);
  const std::size_t end = half == kept_.npos ? kept_.size() : half + 1;
  // Exclude the previous warning from the count.
  const bool told = !note_.empty() && kept_.compare(begin, note_.size(), note_) == 0;
  dropped_ += end - begin - (told ? note_.size() : 0);
  note_ =
      fmt::format("{}tessera: warning: {} bytes of this log were dropped because nobody read it\n",
                  begin == 0 ? "\n" : "", dropped_);
  kept_.replace(begin, end - begin, note_);
}

bool LogOutput::wait(std::chrono::milliseconds patience, std::chrono::milliseconds most) {
  using Clock = std::chrono::steady_clock;
  const auto last = Clock::now() + most;
  auto end = std::min(last, Clock::now() + patience);
  flush();
  for (std::size_t before = kept(); before > 0; before = kept()) {
    const int waited_for = fd();
    if (waited_for < 0 || !is_ready(waited_for, comm::milliseconds_until(end))) break;
    flush();
    if (kept() < before) end = std::min(last, Clock::now() + patience);
    if (Clock::now() >= end) break;
  }
  return kept() == 0;
}

void LogOutput::finish(std::chrono::milliseconds patience, std::chrono::milliseconds most) {
  if (wait(patience, most)) return;
  const std::lock_guard lock(mutex_);
  kept_.clear();
}

}  // namespace tessera::tools
