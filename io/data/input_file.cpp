#include "io/data/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: opening a FIFO that nobody writes to must not wait. Without effect on plain files.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require<IoError>(descriptor_ >= 0, "cannot open {}: {}", path_, std::strerror(errno));
  struct stat status {};
  const int failed = ::fstat(descriptor_, &status) != 0 ? errno : 0;
  if (failed != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    require<IoError>(failed == 0, "cannot stat {}: {}", path_, std::strerror(failed));
    throw IoError("{} is {}, expected a regular file{}", path_,
                  S_ISDIR(status.st_mode) ? "a directory" : "a device, pipe or socket",
                  S_ISDIR(status.st_mode) ? fmt::format("; name its files, e.g. '{}/*.bin'", path_)
                                          : std::string());
  }
  size_ = status.st_size;
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void InputFile::read(std::int64_t offset, std::size_t bytes, void* dst) const {
  auto* out = static_cast<char*>(dst);
  while (bytes > 0) {
    const ssize_t got = ::pread(descriptor_, out, bytes, offset);
    if (got < 0 && errno == EINTR) continue;
    require<IoError>(got >= 0, "cannot read {} bytes of {} at byte {}: {}", bytes, path_, offset,
                     std::strerror(errno));
    require<IoError>(got > 0, "{} ends at byte {}, but had {} bytes when it was opened: it was cut",
                     path_, offset, size_);
    out += got;
    offset += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

std::string InputFile::read_all() const {
  std::string text(static_cast<std::size_t>(size_), '\0');
  read(0, text.size(), text.data());
  return text;
}

}  // namespace tessera::io
