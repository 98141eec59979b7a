// Functions that glibc 2.28 lacks, for what is linked with the libraries of older_glibc.py: those that the program, the C++
// library and Debian's archives call. On newer systems they do the same as glibc's.

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ctime>

extern "C" {

// std::random_device.
std::uint32_t arc4random() noexcept {
  std::uint32_t value = 0;
  if (::getentropy(&value, sizeof(value)) != 0) std::abort();
  return value;
}

// The C++ library then always counts references atomically.
char __libc_single_threaded = 0;

int fstatat(int dir, const char* path, struct stat* out, int flags) noexcept {
  return static_cast<int>(::syscall(SYS_newfstatat, dir, path, out, flags));
}
int stat(const char* path, struct stat* out) noexcept { return fstatat(AT_FDCWD, path, out, 0); }
int lstat(const char* path, struct stat* out) noexcept {
  return fstatat(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW);
}
int fstat(int fd, struct stat* out) noexcept { return fstatat(fd, "", out, AT_EMPTY_PATH); }
int fstat64(int fd, struct stat64* out) noexcept {
  return fstat(fd, reinterpret_cast<struct stat*>(out));
}

// std::condition_variable with a steady clock, which checks that clock after each return, also after an early one.
// Waits for at most a second of the system clock at a time, as setting that back makes the wait longer.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  timespec now{}, real{};
  ::clock_gettime(clock, &now);
  ::clock_gettime(CLOCK_REALTIME, &real);
  constexpr long kSecond = 1'000'000'000;
  timespec left{until->tv_sec - now.tv_sec, until->tv_nsec - now.tv_nsec};
  if (left.tv_nsec < 0) left = {left.tv_sec - 1, left.tv_nsec + kSecond};
  const bool is_long = left.tv_sec >= 1;
  if (is_long) left = {1, 0};
  timespec at{real.tv_sec + left.tv_sec, real.tv_nsec + left.tv_nsec};
  if (at.tv_nsec >= kSecond) at = {at.tv_sec + 1, at.tv_nsec - kSecond};
  const int result = ::pthread_cond_timedwait(condition, mutex, &at);
  return is_long && result == ETIMEDOUT ? 0 : result;
}

const char* sigabbrev_np(int signal) noexcept {
  switch (signal) {
    case SIGABRT:
      return "ABRT";
    case SIGBUS:
      return "BUS";
    case SIGFPE:
      return "FPE";
    case SIGHUP:
      return "HUP";
    case SIGILL:
      return "ILL";
    case SIGINT:
      return "INT";
    case SIGKILL:
      return "KILL";
    case SIGQUIT:
      return "QUIT";
    case SIGSEGV:
      return "SEGV";
    case SIGTERM:
      return "TERM";
    default:
      return nullptr;
  }
}

// Startup code of glibc 2.34 and newer leaves the constructors of the program to glibc. Older ones expect them in
// `init`. Shared libraries have neither these symbols nor a start.
using Main = int(int, char**, char**);
[[gnu::weak]] extern void (*__init_array_start[])(int, char**, char**);
[[gnu::weak]] extern void (*__init_array_end[])(int, char**, char**);
int __real___libc_start_main(Main* main, int argc, char** argv, void (*init)(int, char**, char**),
                             void (*fini)(), void (*rtld_fini)(), void* stack_end);
int __wrap___libc_start_main(Main* main, int argc, char** argv, void (*)(int, char**, char**),
                             void (*)(), void (*rtld_fini)(), void* stack_end) {
  const auto construct = [](int count, char** arguments, char** environment) {
    for (auto* each = __init_array_start; each != __init_array_end; ++each)
      (*each)(count, arguments, environment);
  };
  return __real___libc_start_main(main, argc, argv, construct, nullptr, rtld_fini, stack_end);
}

}  // extern "C"
