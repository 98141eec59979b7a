// For LD_PRELOAD: numbers the system calls with which a rank changes its checkpoints, and makes one
// of them fail or logs all of them. Controlled by environment variables:
//
//   TESSERA_FAULT_RANK   affected rank (RANK), or "all" with kind log
//   TESSERA_FAULT_CALL   number of the call; call 1 is the first that creates, writes, renames or
//                        removes something under a directory named checkpoints
//   TESSERA_FAULT_KIND   kill         SIGKILL before the call
//                        kill-after   SIGKILL after it
//                        kill-half    SIGKILL after half of a write; after any other call
//                        stop         SIGSTOP before it
//                        short        half of a write is done, and its byte count returned
//                        ENOSPC, EIO, EROFS, EINTR   the call does nothing and fails
//                        log          appends a line per call to TESSERA_FAULT_LOG, in
//                                     order across ranks
//   TESSERA_FAULT_MARK   file that receives the time of the fault
//
// Fields of a log line, separated by tabs: rank, number, call ("failed" if it did), inode, offset,
// bytes, offset of the data in TESSERA_FAULT_LOG.data, path, second path.

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/machine_time.h"

#define TESSERA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum class Kind { None, Kill, KillAfter, KillHalf, Stop, Short, Errno, Log };

enum class Fate { Done, DoneThenKilled, HalfThenKilled, Half, Failed };

/// Description of a call in the log.
struct Call {
  const char* name;
  std::string path;
  std::string path2{};
  bool changes = true;  ///< false: counted only after a call that changes something
};

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

#define TESSERA_REAL(name) \
  static const auto next = real<decltype(&::name)>(#name) /* NOLINT(bugprone-macro-parentheses) */

std::string variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? std::string() : std::string(text);
}

bool concerns(const std::string& path) {
  return path.find("/checkpoints/") != std::string::npos || path.ends_with("/checkpoints");
}

std::string path_of(int fd) {
  char text[PATH_MAX];
  const ssize_t n = ::readlink(fmt::format("/proc/self/fd/{}", fd).c_str(), text, sizeof(text));
  return n < 0 ? std::string() : std::string(text, static_cast<std::size_t>(n));
}

std::string path_at(int dir, const char* path) {
  if (path == nullptr) return {};
  if (path[0] == '/') return path;
  if (dir != AT_FDCWD) return path_of(dir) + "/" + path;
  char cwd[PATH_MAX];
  return std::string(::getcwd(cwd, sizeof(cwd)) == nullptr ? "" : cwd) + "/" + path;
}

std::uint64_t inode(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? status.st_ino : 0;
}

std::uint64_t inode(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

class Faults {
 public:
  static Faults& get() {
    static auto* const faults = new Faults;  // never destroyed: calls come until the process ends
    return *faults;
  }

  bool watches() const { return kind_ != Kind::None; }
  bool logs() const { return kind_ == Kind::Log; }

  Fate decide(const Call& call) {
    if (!concerns(call.path) && !concerns(call.path2)) return Fate::Done;
    const std::lock_guard lock(mutex_);
    if (count_ == 0 && !call.changes) return Fate::Done;
    ++count_;
    if (count_ != number_) return Fate::Done;
    if (!mark_.empty()) tessera::test::Stopwatch().save(mark_.c_str());
    switch (kind_) {
      case Kind::Kill:
        die();
      case Kind::KillAfter:
        return Fate::DoneThenKilled;
      case Kind::KillHalf:
        return Fate::HalfThenKilled;
      case Kind::Stop:
        ::raise(SIGSTOP);
        return Fate::Done;
      case Kind::Short:
        return Fate::Half;
      case Kind::Errno:
        return Fate::Failed;
      case Kind::None:
      case Kind::Log:
        break;
    }
    return Fate::Done;
  }

  int error() const { return error_; }

  [[noreturn]] static void die() {
    ::kill(::getpid(), SIGKILL);
    for (;;) ::pause();
  }

  /// Makes a call and logs it, under a lock across ranks.
  /// @param note  returns the inode, offset and bytes afterwards
  template <typename Real, typename Note>
  auto log(const Call& call, Real&& make, Note&& note) -> decltype(make()) {
    const std::lock_guard lock(mutex_);
    if ((!concerns(call.path) && !concerns(call.path2)) || (count_ == 0 && !call.changes)) {
      return make();
    }
    static const auto close = real<decltype(&::close)>("close");
    static const auto write = real<decltype(&::write)>("write");
    static const auto open = real<decltype(&::open)>("open");
    const int log = open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    const int data =
        open((log_ + ".data").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    ::flock(log, LOCK_EX);
    const auto result = make();
    const int error = errno;
    const Noted noted = result < 0 ? Noted{} : note(static_cast<std::int64_t>(result));
    const auto at = ::lseek(data, 0, SEEK_END);
    if (noted.data != nullptr) {
      const auto bytes = static_cast<std::size_t>(noted.bytes);
      if (write(data, noted.data, bytes) != noted.bytes) die();
    }
    const std::string line = fmt::format("{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\n", rank_, ++count_,
                                         result < 0 ? "failed" : call.name, noted.inode,
                                         noted.offset, noted.bytes, at, call.path, call.path2);
    if (write(log, line.data(), line.size()) != static_cast<ssize_t>(line.size())) die();
    close(data);
    close(log);
    errno = error;
    return result;
  }

  struct Noted {
    std::uint64_t inode = 0;
    std::int64_t offset = 0, bytes = 0;
    const void* data = nullptr;
  };

 private:
  Faults()
      : rank_(variable("RANK")),
        log_(variable("TESSERA_FAULT_LOG")),
        mark_(variable("TESSERA_FAULT_MARK")) {
    const std::string wanted = variable("TESSERA_FAULT_RANK");
    if (rank_.empty() || (wanted != rank_ && wanted != "all")) return;
    const std::string kind = variable("TESSERA_FAULT_KIND");
    struct Named {
      const char* name;
      Kind kind;
      int error;
    };
    for (const Named& named :
         {Named{"kill", Kind::Kill, 0}, Named{"kill-after", Kind::KillAfter, 0},
          Named{"kill-half", Kind::KillHalf, 0}, Named{"stop", Kind::Stop, 0},
          Named{"short", Kind::Short, 0}, Named{"log", Kind::Log, 0},
          Named{"ENOSPC", Kind::Errno, ENOSPC}, Named{"EIO", Kind::Errno, EIO},
          Named{"EROFS", Kind::Errno, EROFS}, Named{"EINTR", Kind::Errno, EINTR}}) {
      if (kind != named.name) continue;
      kind_ = named.kind;
      error_ = named.error;
    }
    if (kind_ == Kind::None) std::abort();  // a typing mistake must not pass as a success
    number_ = std::strtoll(variable("TESSERA_FAULT_CALL").c_str(), nullptr, 10);
  }

  std::mutex mutex_;
  std::string rank_, log_, mark_;
  Kind kind_ = Kind::None;
  int error_ = 0;
  std::int64_t number_ = 0, count_ = 0;
};

Faults::Noted nothing(std::int64_t) { return {}; }

/// A call that either succeeds or fails as a whole.
template <typename Real, typename Note = Faults::Noted (*)(std::int64_t)>
auto whole(const Call& call, Real&& make, Note&& note = nothing) -> decltype(make()) {
  Faults& faults = Faults::get();
  if (faults.logs()) return faults.log(call, make, note);
  switch (faults.decide(call)) {
    case Fate::Failed:
      errno = faults.error();
      return -1;
    case Fate::DoneThenKilled:
    case Fate::HalfThenKilled:
      make();
      Faults::die();
    case Fate::Done:
    case Fate::Half:
      break;
  }
  return make();
}

/// A call that may transfer fewer bytes than requested; make(n) tries n bytes.
template <typename Real>
ssize_t part(const Call& call, int fd, std::int64_t offset, const void* data, std::size_t bytes,
             Real&& make) {
  Faults& faults = Faults::get();
  if (faults.logs()) {
    if (offset < 0) offset = ::lseek(fd, 0, SEEK_CUR);
    return faults.log(
        call, [&] { return make(bytes); },
        [&](std::int64_t done) {
          return Faults::Noted{inode(fd), offset, done, data};
        });
  }
  switch (faults.decide(call)) {
    case Fate::Failed:
      errno = faults.error();
      return -1;
    case Fate::DoneThenKilled:
      make(bytes);
      Faults::die();
    case Fate::HalfThenKilled:
      make(std::max<std::size_t>(bytes / 2, 1));
      Faults::die();
    case Fate::Half:
      return make(std::max<std::size_t>(bytes / 2, 1));
    case Fate::Done:
      break;
  }
  return make(bytes);
}

bool watches() { return Faults::get().watches(); }

template <typename Real>
int opened(const std::string& path, int flags, Real&& make) {
  const bool creates = (flags & (O_CREAT | O_TRUNC)) != 0;
  return whole(Call{creates ? "create" : "open", path, {}, creates}, make,
               [](std::int64_t fd) { return Faults::Noted{inode(static_cast<int>(fd))}; });
}

template <typename Real>
int renamed(const char* name, int from_dir, const char* from, int to_dir, const char* to,
            Real&& make) {
  const Call call{name, path_at(from_dir, from), path_at(to_dir, to)};
  return whole(call, make, [&](std::int64_t) { return Faults::Noted{inode(call.path2)}; });
}

const char* rename_name(unsigned flags) {
  return (flags & RENAME_EXCHANGE) != 0 ? "exchange" : "rename";
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

#define TESSERA_OPEN(name)                                                    \
  TESSERA_EXPORT int name(const char* path, int flags, ...) {                 \
    va_list arguments;                                                        \
    va_start(arguments, flags);                                               \
    const mode_t mode = mode_of(flags, arguments);                            \
    va_end(arguments);                                                        \
    TESSERA_REAL(name);                                                       \
    const auto make = [&] { return next(path, flags, mode); };                \
    return watches() ? opened(path_at(AT_FDCWD, path), flags, make) : make(); \
  }
#define TESSERA_OPENAT(name)                                             \
  TESSERA_EXPORT int name(int dir, const char* path, int flags, ...) {   \
    va_list arguments;                                                   \
    va_start(arguments, flags);                                          \
    const mode_t mode = mode_of(flags, arguments);                       \
    va_end(arguments);                                                   \
    TESSERA_REAL(name);                                                  \
    const auto make = [&] { return next(dir, path, flags, mode); };      \
    return watches() ? opened(path_at(dir, path), flags, make) : make(); \
  }
#define TESSERA_CREAT(name)                                                               \
  TESSERA_EXPORT int name(const char* path, mode_t mode) {                                \
    TESSERA_REAL(name);                                                                   \
    const auto make = [&] { return next(path, mode); };                                   \
    return watches() ? opened(path_at(AT_FDCWD, path), O_CREAT | O_TRUNC, make) : make(); \
  }
#define TESSERA_PWRITE(name)                                                                  \
  TESSERA_EXPORT ssize_t name(int fd, const void* data, std::size_t bytes, off_t at) {        \
    TESSERA_REAL(name);                                                                       \
    const auto make = [&](std::size_t n) { return next(fd, data, n, at); };                   \
    return watches() ? part({"write", path_of(fd)}, fd, at, data, bytes, make) : make(bytes); \
  }
#define TESSERA_TRUNCATE(name)                                                      \
  TESSERA_EXPORT int name(int fd, off_t size) noexcept {                            \
    TESSERA_REAL(name);                                                             \
    const auto make = [&] { return next(fd, size); };                               \
    const auto note = [&](std::int64_t) { return Faults::Noted{inode(fd), size}; }; \
    return watches() ? whole({"truncate", path_of(fd)}, make, note) : make();       \
  }
#define TESSERA_FALLOCATE(name)                                                          \
  TESSERA_EXPORT int name(int fd, int mode, off_t at, off_t bytes) {                     \
    TESSERA_REAL(name);                                                                  \
    const auto make = [&] { return next(fd, mode, at, bytes); };                         \
    const auto note = [&](std::int64_t) { return Faults::Noted{inode(fd), at, bytes}; }; \
    return watches() ? whole({"allocate", path_of(fd)}, make, note) : make();            \
  }
#define TESSERA_SYNC(name)                                                           \
  TESSERA_EXPORT int name(int fd) {                                                  \
    TESSERA_REAL(name);                                                              \
    const auto make = [&] { return next(fd); };                                      \
    const auto note = [&](std::int64_t) { return Faults::Noted{inode(fd)}; };        \
    return watches() ? whole({"sync", path_of(fd), {}, false}, make, note) : make(); \
  }
#define TESSERA_REMOVE(name)                                                      \
  TESSERA_EXPORT int name(const char* path) noexcept {                            \
    TESSERA_REAL(name);                                                           \
    const auto make = [&] { return next(path); };                                 \
    return watches() ? whole({"remove", path_at(AT_FDCWD, path)}, make) : make(); \
  }

TESSERA_OPEN(open)
TESSERA_OPEN(open64)
TESSERA_OPENAT(openat)
TESSERA_OPENAT(openat64)
TESSERA_CREAT(creat)
TESSERA_CREAT(creat64)
TESSERA_PWRITE(pwrite)
TESSERA_PWRITE(pwrite64)
TESSERA_TRUNCATE(ftruncate)
TESSERA_TRUNCATE(ftruncate64)
TESSERA_FALLOCATE(fallocate)
TESSERA_FALLOCATE(fallocate64)
TESSERA_SYNC(fsync)
TESSERA_SYNC(fdatasync)
TESSERA_REMOVE(unlink)
TESSERA_REMOVE(rmdir)
TESSERA_REMOVE(remove)

TESSERA_EXPORT int unlinkat(int dir, const char* path, int flags) noexcept {
  TESSERA_REAL(unlinkat);
  const auto make = [&] { return next(dir, path, flags); };
  return watches() ? whole({"remove", path_at(dir, path)}, make) : make();
}

TESSERA_EXPORT int mkdir(const char* path, mode_t mode) noexcept {
  TESSERA_REAL(mkdir);
  const auto make = [&] { return next(path, mode); };
  const std::string whole_path = watches() ? path_at(AT_FDCWD, path) : std::string();
  const auto note = [&](std::int64_t) { return Faults::Noted{inode(whole_path)}; };
  return watches() ? whole({"mkdir", whole_path}, make, note) : make();
}

TESSERA_EXPORT int rename(const char* from, const char* to) noexcept {
  TESSERA_REAL(rename);
  const auto make = [&] { return next(from, to); };
  return watches() ? renamed("rename", AT_FDCWD, from, AT_FDCWD, to, make) : make();
}

TESSERA_EXPORT int renameat(int from_dir, const char* from, int to_dir, const char* to) noexcept {
  TESSERA_REAL(renameat);
  const auto make = [&] { return next(from_dir, from, to_dir, to); };
  return watches() ? renamed("rename", from_dir, from, to_dir, to, make) : make();
}

TESSERA_EXPORT int renameat2(int from_dir, const char* from, int to_dir, const char* to,
                             unsigned flags) noexcept {
  TESSERA_REAL(renameat2);
  const auto make = [&] { return next(from_dir, from, to_dir, to, flags); };
  return watches() ? renamed(rename_name(flags), from_dir, from, to_dir, to, make) : make();
}

TESSERA_EXPORT ssize_t write(int fd, const void* data, std::size_t bytes) {
  TESSERA_REAL(write);
  const auto make = [&](std::size_t n) { return next(fd, data, n); };
  return watches() ? part({"write", path_of(fd)}, fd, -1, data, bytes, make) : make(bytes);
}

TESSERA_EXPORT ssize_t writev(int fd, const iovec* parts, int count) {
  TESSERA_REAL(writev);
  if (!watches()) return next(fd, parts, count);
  const std::string path = path_of(fd);
  if (!concerns(path)) return next(fd, parts, count);
  // Joined into one write, which can be halved.
  std::vector<char> all;
  for (int i = 0; i < count; ++i) {
    const auto* begin = static_cast<const char*>(parts[i].iov_base);
    all.insert(all.end(), begin, begin + parts[i].iov_len);
  }
  return write(fd, all.data(), all.size());
}

TESSERA_EXPORT int sync_file_range(int fd, off64_t at, off64_t bytes, unsigned flags) {
  TESSERA_REAL(sync_file_range);
  const auto make = [&] { return next(fd, at, bytes, flags); };
  // Makes nothing durable: the file size may be lost.
  return watches() ? whole({"flush", path_of(fd), {}, false}, make) : make();
}

TESSERA_EXPORT ssize_t copy_file_range(int from, off64_t* from_at, int to, off64_t* to_at,
                                       std::size_t bytes, unsigned flags) {
  TESSERA_REAL(copy_file_range);
  const auto make = [&] { return next(from, from_at, to, to_at, bytes, flags); };
  return watches() ? whole({"copy", path_of(to)}, make) : make();
}

TESSERA_EXPORT int close(int fd) {
  TESSERA_REAL(close);
  const auto make = [&] { return next(fd); };
  if (!watches()) return make();
  Faults& faults = Faults::get();
  const Call call{"close", path_of(fd), {}, false};
  if (faults.logs()) return whole(call, make);
  const Fate fate = faults.decide(call);
  const int result = make();  // Linux frees the descriptor even if close fails
  if (fate == Fate::DoneThenKilled || fate == Fate::HalfThenKilled) Faults::die();
  if (fate != Fate::Failed) return result;
  errno = faults.error();
  return -1;
}

TESSERA_EXPORT long syscall(long number, ...) noexcept {
  va_list arguments;
  va_start(arguments, number);
  long a[6];
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  TESSERA_REAL(syscall);
  const auto make = [&] { return next(number, a[0], a[1], a[2], a[3], a[4], a[5]); };
  if (number != SYS_renameat2 || !watches()) return make();
  const auto path = [](long argument) {
    return reinterpret_cast<const char*>(argument);  // NOLINT(performance-no-int-to-ptr)
  };
  return renamed(rename_name(static_cast<unsigned>(a[4])), static_cast<int>(a[0]), path(a[1]),
                 static_cast<int>(a[2]), path(a[3]), [&] { return static_cast<int>(make()); });
}
