// For LD_PRELOAD: makes reads of *.bin files as slow as a disk's, in every other second (by the clock), so
// that a run can be compared with itself. Controlled by environment variables:
//
//   SLOW_BYTES_PER_S   bytes per second, over all threads
//   SLOW_SEEK_MS       added to each read
//   SLOW_LOG           file that receives one line at the end: reads and seconds slept
//
// Read-ahead hints and the page cache have no effect on the delay.

#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <thread>

namespace {

using Seconds = std::chrono::duration<double>;

double number(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? 0 : std::strtod(text, nullptr);
}

struct Disk {
  double bytes_per_s = number("SLOW_BYTES_PER_S"), seek = number("SLOW_SEEK_MS") / 1e3;
  std::mutex arm{};
  long reads = 0;
  double slept = 0;
  ~Disk() {
    const char* const path = std::getenv("SLOW_LOG");
    std::FILE* const file = path == nullptr || reads == 0 ? nullptr : std::fopen(path, "w");
    if (file == nullptr) return;
    std::fprintf(file, "%ld %g\n", reads, slept);
    std::fclose(file);
  }
  void wait(int fd, ssize_t bytes) {
    char link[64], path[4096];
    std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = ::readlink(link, path, sizeof(path));
    if (n < 0 || !std::string_view(path, static_cast<std::size_t>(n)).ends_with(".bin")) return;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    if (std::chrono::duration_cast<std::chrono::seconds>(now).count() % 2 == 0) return;
    const std::lock_guard lock(arm);
    const double time = seek + static_cast<double>(bytes) / bytes_per_s;
    std::this_thread::sleep_for(Seconds(time));
    ++reads;
    slept += time;
  }
};
Disk disk;

template <typename Offset>
ssize_t slow_read(const char* name, int fd, void* out, std::size_t bytes, Offset offset) {
  using Read = ssize_t (*)(int, void*, std::size_t, Offset);
  const auto next = reinterpret_cast<Read>(::dlsym(RTLD_NEXT, name));
  const ssize_t got = next(fd, out, bytes, offset);
  if (got > 0 && disk.bytes_per_s > 0) disk.wait(fd, got);
  return got;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ssize_t pread(int fd, void* out, std::size_t n,
                                                                off_t offset) {
  return slow_read("pread", fd, out, n, offset);
}
extern "C" __attribute__((visibility("default"))) ssize_t pread64(int fd, void* out, std::size_t n,
                                                                  off64_t offset) {
  return slow_read("pread64", fd, out, n, offset);
}
