#include "train/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/error.h"

namespace tessera::train {
namespace {

constexpr std::size_t kMaxWaiting = std::size_t{1} << 20;

}  // namespace

AppendFile::AppendFile(std::filesystem::path path) : path_(std::move(path)) {
  // Opening a FIFO would block.
  std::error_code absent;
  const auto type = std::filesystem::status(path_, absent).type();
  using enum std::filesystem::file_type;
  require<IoError>(type != fifo && type != socket && type != directory,
                   "cannot append to {}: it is no regular file; move it away", path_.string());
  fd_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
  require<IoError>(fd_ >= 0, "cannot open {}: {}", path_.string(), std::strerror(errno));
}

AppendFile::~AppendFile() { ::close(fd_); }

void AppendFile::write(std::string_view record) {
  const std::size_t waited = waiting_.size();
  std::string error = write_waiting();  // frees room
  if (waiting_.size() < waited) is_full_ = false;
  // A shorter record must not follow one that was lost.
  is_full_ = is_full_ || waiting_.size() + record.size() > kMaxWaiting;
  if (is_full_) {
    ++lost_;
    return;
  }
  waiting_ += record;
  if (error.empty()) error = write_waiting();
  if (!error.empty() && waited == 0) warning_ = error;
}

// @return the error; empty if everything was written
std::string AppendFile::write_waiting() {
  while (!waiting_.empty()) {
    const ssize_t n = ::write(fd_, waiting_.data(), waiting_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return fmt::format("cannot write to {}: {}", path_.string(), std::strerror(errno));
    waiting_.erase(0, static_cast<std::size_t>(n));
  }
  return {};
}

void AppendFile::flush() {
  const std::string error = write_waiting();
  require<IoError>(error.empty() && lost_ == 0, "{}{}",
                   error.empty() ? fmt::format("the disk of {} was full", path_.string()) : error,
                   lost_ == 0 ? "" : fmt::format("; {} records are lost", lost_));
}

}  // namespace tessera::train
