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

int lock_run(const comm::FileDescriptor& lock, const fs::path& run, std::string_view advice) {
  // Retry, because is_idle_run() of another process may hold the lock for a moment.
  for (int left = 5; ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0;) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return errno;
    if (--left > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    std::array<char, 256> holder{};
    const auto bytes = ::pread(lock.get(), holder.data(), holder.size() - 1, 0);
    throw InvalidArgument(
        "{} is in use {}", run.string(),
        fmt::format(fmt::runtime(advice), bytes > 0 ? holder.data() : "unknown process"));
  }
  return 0;
}

comm::FileDescriptor open_run_directory(const fs::path& path) {
  try {
    io::make_directories_durably(path / "logs");
  } catch (const IoError& error) {
    throw IoError("cannot create the run directory {}: {}", path.string(), error.what());
  }
  const fs::path file = path / ".lock";
  comm::FileDescriptor lock(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  require<IoError>(static_cast<bool>(lock), "cannot open {}: {}", file.string(),
                   std::strerror(errno));
  const int error =
      lock_run(lock, path, "by another run ({}); choose another --run.out or stop it");
  require<IoError>(
      error == 0,
      "cannot lock {}: {}; without locks two runs could write to it at once: mount the file "
      "system with locks (Lustre: -o flock; NFS: lock service), or choose another --run.out",
      file.string(), std::strerror(error));
  const std::string self = fmt::format("{}, pid {}", host_name(), ::getpid());
  // Errors are ignored: the holder's name is only for messages of other jobs.
  [[maybe_unused]] const bool written =
      ::ftruncate(lock.get(), 0) == 0 && ::pwrite(lock.get(), self.data(), self.size(), 0) >= 0;
  return lock;
}

bool is_idle_run(const fs::path& path) {
  const fs::path lock = path / ".lock";
  const comm::FileDescriptor file(::open(lock.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  // A shared lock, so that ranks that test at the same time don't block each other.
  return file && ::flock(file.get(), LOCK_SH | LOCK_NB) == 0;
}

RankLog::RankLog(const fs::path& run_dir, int rank)
    : path_(run_dir / "logs" / fmt::format("rank-{}.log", rank)) {}

void RankLog::write(const std::string& line) const {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  const std::string text = fmt::format("{:%Y-%m-%dT%H:%M:%SZ} {}\n", utc, escaped_lines(line));
  // O_NONBLOCK, because opening a FIFO could block.
  const comm::FileDescriptor file(
      ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666));
  [[maybe_unused]] const ssize_t written = ::write(file.get(), text.data(), text.size());
}

}  // namespace tessera::tools
