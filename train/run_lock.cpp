#include "train/run_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/base/error.h"

namespace tessera::train {
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

comm::FileDescriptor lock_run_directory(const fs::path& path, std::string_view other) {
  const fs::path file = path / ".lock";
  comm::FileDescriptor lock(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  require<IoError>(static_cast<bool>(lock), "cannot open {}: {}", file.string(),
                   std::strerror(errno));
  const int error =
      lock_run(lock, path, fmt::format("by another run ({{}}); {} or stop it", other));
  require<IoError>(
      error == 0,
      "cannot lock {}: {}; without locks two runs could write to it at once: mount the file "
      "system with locks (Lustre: -o flock; NFS: lock service), or {}",
      file.string(), std::strerror(error), other);
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

}  // namespace tessera::train
