#include "tools/tessera/train/run_directory.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "core/base/error.h"
#include "io/base/file.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown host";
  return name.data();
}

}  // namespace

RunDirectory::RunDirectory(fs::path path) : path_(std::move(path)) {
  try {
    io::make_directories_durably(path_ / "logs");
  } catch (const IoError& error) {
    throw IoError("cannot create the run directory {}: {}", path_.string(), error.what());
  }
  const fs::path lock = path_ / ".lock";
  lock_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  require<IoError>(lock_ >= 0, "cannot open {}: {}", lock.string(), std::strerror(errno));
  // Retry: is_idle_run() of another process holds the lock briefly.
  constexpr int kAttempts = 5;
  int locked = 0;
  for (int attempt = 1;; ++attempt) {
    do locked = ::flock(lock_, LOCK_EX | LOCK_NB);
    while (locked != 0 && errno == EINTR);
    if (locked == 0 || errno != EWOULDBLOCK || attempt == kAttempts) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (locked != 0 && errno != EWOULDBLOCK) {
    const int error = errno;
    ::close(lock_);
    throw IoError(
        "cannot lock {}: {}; without locks two runs could write to it at once: mount the file "
        "system with locks (Lustre: -o flock; NFS: lock service), or choose another --run.out",
        lock.string(), std::strerror(error));
  }
  if (locked != 0) {
    std::array<char, 256> holder{};
    const auto bytes = ::pread(lock_, holder.data(), holder.size() - 1, 0);
    ::close(lock_);
    throw InvalidArgument("{} is in use by another run ({}); choose another --run.out or stop it",
                          path_.string(), bytes > 0 ? holder.data() : "unknown process");
  }
  const std::string self = fmt::format("{}, pid {}", host_name(), ::getpid());
  // Holder for error messages; the lock does not depend on it.
  [[maybe_unused]] const bool written =
      ::ftruncate(lock_, 0) == 0 && ::pwrite(lock_, self.data(), self.size(), 0) >= 0;
}

bool is_idle_run(const fs::path& path) {
  const fs::path lock = path / ".lock";
  const int fd = ::open(lock.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return false;
  // A shared lock, so that ranks that test at the same time don't block each other.
  const bool is_idle = ::flock(fd, LOCK_SH | LOCK_NB) == 0;
  ::close(fd);
  return is_idle;
}

RunDirectory::~RunDirectory() { ::close(lock_); }

RankLog::RankLog(const fs::path& run_dir, int rank)
    : path_(run_dir / "logs" / fmt::format("rank-{}.log", rank)) {}

void RankLog::write(const std::string& line) const {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  const std::string text = fmt::format("{:%Y-%m-%dT%H:%M:%SZ} {}\n", utc, escaped_lines(line));
  // O_NONBLOCK: opening a FIFO would block.
  const int fd =
      ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
  if (fd < 0) return;
  [[maybe_unused]] const ssize_t written = ::write(fd, text.data(), text.size());
  ::close(fd);
}

}  // namespace tessera::tools
