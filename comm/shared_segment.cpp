#include "comm/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "core/base/error.h"

namespace tessera::comm {
namespace {

constexpr std::string_view kNamePrefix = "tessera-";

IoError system_error(std::string_view what, int code) {
  return IoError("shared memory: {}: {}", what, std::strerror(code));
}

// Target of a /proc/PID/fd link, which contains the segment's name.
std::string name_of_file(const std::string& path) {
  std::array<char, 256> text;
  const ssize_t n = ::readlink(path.c_str(), text.data(), text.size());
  return n < 0 ? std::string() : std::string(text.data(), static_cast<std::size_t>(n));
}

std::string proc_path(int fd) { return fmt::format("/proc/self/fd/{}", fd); }

std::shared_ptr<std::byte> map(int fd, std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED) throw system_error("mapping it failed", errno);
  return {static_cast<std::byte*>(data), [bytes](std::byte* p) { ::munmap(p, bytes); }};
}

// Uses open-file-description locks, which the system releases with the last descriptor, even if the
// process is killed.
bool lock(int fd, int command, short type, int index, short* found = nullptr) {
  struct flock place {};
  place.l_type = type;
  place.l_whence = SEEK_SET;
  place.l_start = index;
  place.l_len = 1;
  int result = 0;
  do {
    result = ::fcntl(fd, command, &place);
  } while (result != 0 && errno == EINTR);
  if (found != nullptr) *found = place.l_type;
  return result == 0;
}

FileDescriptor open_file(const std::string& path) {
  return FileDescriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
}

}  // namespace

SharedSegment::SharedSegment(FileDescriptor file, std::string address, std::size_t bytes,
                             std::shared_ptr<std::byte> memory)
    : file_(std::move(file)),
      address_(std::move(address)),
      bytes_(bytes),
      memory_(std::move(memory)) {}

SharedSegment SharedSegment::create(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  std::random_device random;
  const std::string name = fmt::format("{}{:08x}{:08x}", kNamePrefix, random(), random());
  FileDescriptor file(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw system_error("memfd_create failed", errno);
  // Exceeding RLIMIT_FSIZE would raise SIGXFSZ.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    throw IoError("shared memory: {} bytes exceed the limit of file sizes, {} (ulimit -f)", bytes,
                  limit.rlim_cur);
  }
  int code = 0;
  do {
    code = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  } while (code == EINTR);
  if (code != 0) throw system_error(fmt::format("allocating {} bytes failed", bytes), code);
  // Seal the size, because reading past the end of a file that shrank raises SIGBUS.
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_error("sealing it failed", errno);
  }
  auto memory = map(file.get(), bytes);
  std::string address = fmt::format("{}/{}/{}", ::getpid(), file.get(), name);
  return SharedSegment(std::move(file), std::move(address), bytes, std::move(memory));
}

SharedSegment SharedSegment::open(const std::string& address) {
  const std::size_t first = address.find('/');
  const std::size_t second = first == address.npos ? first : address.find('/', first + 1);
  if (second == address.npos || !address.substr(second + 1).starts_with(kNamePrefix)) {
    throw IoError("shared memory: '{}' is not the address of a segment", address);
  }
  const std::string path = fmt::format("/proc/{}/fd/{}", address.substr(0, first),
                                       address.substr(first + 1, second - first - 1));
  // Check the name before opening, because opening another file may have side effects, and again
  // afterwards.
  const std::string name = fmt::format("/memfd:{} (deleted)", address.substr(second + 1));
  const std::string seen = name_of_file(path);
  if (!seen.empty() && seen != name) {
    throw IoError("shared memory: {} is not the segment here; is its process in another container?",
                  path);
  }
  FileDescriptor file = open_file(path);
  if (!file) throw system_error("opening " + path + " failed", errno);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw system_error("reading its size failed", errno);
  if (name_of_file(proc_path(file.get())) != name) {
    throw IoError("shared memory: {} became another file while it was opened", path);
  }
  const auto bytes = static_cast<std::size_t>(status.st_size);
  auto memory = map(file.get(), bytes);
  return SharedSegment(std::move(file), address, bytes, std::move(memory));
}

SharedSegment SharedSegment::open_again() const {
  FileDescriptor file = open_file(proc_path(file_.get()));
  if (!file) throw system_error("opening it again failed", errno);
  return SharedSegment(std::move(file), address_, bytes_, memory_);
}

void SharedSegment::hold(int index) {
  if (!lock(file_.get(), F_OFD_SETLK, F_WRLCK, index)) {
    throw system_error(fmt::format("locking byte {} failed", index), errno);
  }
  if (!open_again().is_held_elsewhere(index)) {
    throw IoError("shared memory: this system does not support locks on memfd files");
  }
}

void SharedSegment::let_go(int index) const noexcept {
  lock(file_.get(), F_OFD_SETLK, F_UNLCK, index);
}

bool SharedSegment::is_held_elsewhere(int index) const noexcept {
  short found = F_UNLCK;
  // If the call fails, the lock counts as held; a dead rank is then detected at the deadline.
  return !lock(file_.get(), F_OFD_GETLK, F_WRLCK, index, &found) || found != F_UNLCK;
}

}  // namespace tessera::comm
