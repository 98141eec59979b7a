#include "io/base/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "io/base/placed.h"

namespace tessera::io {
namespace {

// Bytes per system call; Linux transfers at most about 2 GiB.
constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;

[[noreturn]] void fail(const char* action, const fs::path& path, int error) {
  throw Placed(IoError("cannot {} {}: {}", action, path.string(), std::strerror(error)),
               {path.string(), ""});
}

[[noreturn]] void fail_write(const fs::path& path, std::size_t bytes, int error) {
  throw Placed(IoError("cannot write {}: {} ({} bytes needed, {} bytes free on that file system{})",
                       path.string(), std::strerror(error), bytes, free_bytes(path),
                       error == EFBIG ? "; `ulimit -f` may limit the size of files" : ""),
               {path.string(), ""});
}

bool exchange(const fs::path& a, const fs::path& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

}  // namespace

File File::open(const fs::path& path, Links links) { return open(path, links, O_RDONLY); }

File File::open_for_update(const fs::path& path) { return open(path, Links::Refuse, O_RDWR); }

File File::open(const fs::path& path, Links links, int access) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  const int flags = access | O_CLOEXEC | O_NONBLOCK | (links == Links::Refuse ? O_NOFOLLOW : 0);
  const int fd = ::open(path.c_str(), flags);
  if (fd < 0) {
    if (errno == ELOOP && links == Links::Refuse) {
      throw CorruptCheckpoint("{} is a symbolic link; a checkpoint's files must be regular files",
                              path.string());
    }
    fail("open", path, errno);
  }
  File file(path, fd);
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail("stat", path, errno);
  if (!S_ISREG(status.st_mode)) {
    throw CorruptCheckpoint("{} is a {}; expected a regular file", path.string(),
                            S_ISDIR(status.st_mode)    ? "directory"
                            : S_ISFIFO(status.st_mode) ? "FIFO"
                                                       : "device or socket");
  }
  return file;
}

File File::create(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) fail("create", path, errno);
  return {path, fd};
}

File File::reopen_direct() const {
  // Opens through the descriptor, because the path may name another file by now.
  const int access = ::fcntl(fd_, F_GETFL) & O_ACCMODE;
  const std::string self = fmt::format("/proc/self/fd/{}", fd_);
  return {path_, ::open(self.c_str(), access | O_DIRECT | O_CLOEXEC)};
}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(written_, other.written_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

std::int64_t File::size() const { return identity().size; }

FileIdentity File::identity() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) fail("stat", path_, errno);
  return {status.st_dev, status.st_ino, status.st_size};
}

void File::read(std::int64_t offset, void* data, std::size_t bytes) const {
  auto* out = static_cast<char*>(data);
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t n = ::pread(fd_, out + done, std::min(bytes - done, kMaxTransfer),
                              offset + static_cast<std::int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("read", path_, errno);
    if (n == 0) {
      throw CorruptCheckpoint("{} ends at byte {}; cannot read bytes {} to {}: it was truncated",
                              path_.string(), offset + static_cast<std::int64_t>(done), offset,
                              offset + static_cast<std::int64_t>(bytes));
    }
    done += static_cast<std::size_t>(n);
  }
}

void File::prefetch(std::int64_t offset, std::int64_t bytes) const noexcept {
  if (bytes > 0) ::posix_fadvise(fd_, offset, bytes, POSIX_FADV_WILLNEED);
}

void File::write_at(std::int64_t offset, const void* data, std::size_t bytes) {
  const auto* in = static_cast<const char*>(data);
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = ::pwrite(fd_, in + done, std::min(bytes - done, kMaxTransfer),
                               offset + static_cast<std::int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_write(path_, bytes - done, n < 0 ? errno : EIO);
    done += static_cast<std::size_t>(n);
  }
}

void File::start_writeback(std::int64_t offset, std::int64_t bytes) noexcept {
  ::sync_file_range(fd_, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void File::sync() {
  if (::fsync(fd_) != 0) fail("sync", path_, errno);
}

void File::finish() {
  sync();
  // Network file systems report their last errors on close.
  if (::close(std::exchange(fd_, -1)) != 0) fail("close", path_, errno);
}

std::string read_file(const fs::path& path, std::int64_t max_bytes, Links links) {
  const File file = File::open(path, links);
  const std::int64_t size = file.size();
  require<CorruptCheckpoint>(size <= max_bytes, "{} has {} bytes; at most {} are accepted",
                             path.string(), size, max_bytes);
  std::string content(static_cast<std::size_t>(size), '\0');
  file.read(0, content.data(), content.size());
  return content;
}

void require_replaceable(const fs::path& path) {
  std::error_code absent;
  const fs::file_type type = fs::symlink_status(path, absent).type();
  require<IoError>(type == fs::file_type::regular || type == fs::file_type::not_found,
                   "cannot replace {}: it is no regular file; move it away or choose another path",
                   path.string());
}

void write_file_atomically(const fs::path& path, std::string_view content) {
  require_replaceable(path);
  fs::path temporary = path;
  temporary += ".tmp";
  std::error_code ignored;
  fs::remove(temporary, ignored);
  try {
    File file = File::create(temporary);
    file.write(content.data(), content.size());
    file.finish();
    rename_path(temporary, path);
  } catch (...) {
    fs::remove(temporary, ignored);
    throw;
  }
  sync_directory(path.parent_path());
}

void sync_directory(const fs::path& path) {
  const int fd = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("open directory", path, errno);
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // EINVAL means that the file system does not sync directories.
  if (result != 0 && error != EINVAL) fail("sync directory", path, error);
}

void make_directories_durably(const fs::path& path) {
  std::error_code error;
  std::vector<fs::path> missing;
  for (fs::path p = fs::absolute(path); !fs::exists(p, error); p = p.parent_path()) {
    missing.push_back(p);
  }
  for (auto p = missing.rbegin(); p != missing.rend(); ++p) {
    fs::create_directory(*p, error);
    require<IoError>(!error, "cannot make directory {}: {}", p->string(), error.message());
    sync_directory(p->parent_path());
  }
  require<IoError>(fs::is_directory(path, error), "cannot make directory {}: it is a file",
                   path.string());
}

void rename_path(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    throw IoError("cannot rename {} to {}: {}", from.string(), to.string(), std::strerror(errno));
  }
}

bool rename_to_new(const fs::path& from, const fs::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return true;
  if (errno == EEXIST) return false;
  if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) {
    // For a directory `from`, rename(2) fails if `to` is a file or a non-empty directory.
    std::error_code error;
    if (fs::exists(fs::symlink_status(to, error))) return false;
    if (::rename(from.c_str(), to.c_str()) == 0) return true;
    if (errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR) return false;
  }
  throw IoError("cannot rename {} to {}: {}", from.string(), to.string(), std::strerror(errno));
}

void exchange_paths(const fs::path& a, const fs::path& b) {
  if (!exchange(a, b)) {
    throw IoError("cannot swap {} and {} atomically: {}; move {} away and repeat", a.string(),
                  b.string(), std::strerror(errno), b.string());
  }
}

void require_exchange(const fs::path& dir, const fs::path& target) {
  const fs::path a = dir / "exchange-a", b = dir / "exchange-b";
  for (const fs::path& path : {a, b}) {
    std::error_code error;
    fs::create_directory(path, error);
    require<IoError>(!error, "cannot make directory {}: {}", path.string(), error.message());
  }
  const bool can = exchange(a, b);
  std::error_code ignored;
  for (const fs::path& path : {a, b}) fs::remove(path, ignored);
  require<IoError>(can,
                   "this file system cannot atomically swap {} with another directory, as "
                   "--overwrite requires; move it away and repeat without --overwrite",
                   target.string());
}

bool move_into_place(const fs::path& made, const fs::path& target, bool overwrite) {
  std::error_code error;
  if (!overwrite || !fs::exists(fs::symlink_status(target, error))) {
    return rename_to_new(made, target);
  }
  exchange_paths(made, target);
  return true;
}

std::int64_t free_bytes(const fs::path& path) {
  std::error_code error;
  fs::path place = fs::absolute(path, error);
  while (!error && !fs::exists(place, error) && place.has_relative_path()) {
    place = place.parent_path();
  }
  const fs::space_info space = fs::space(place, error);
  // FUSE file systems may report zero blocks, which means unknown.
  return error || space.capacity == 0 ? -1 : static_cast<std::int64_t>(space.available);
}

void require_space(const fs::path& path, std::int64_t bytes) {
  const std::int64_t available = free_bytes(path.parent_path());
  require<IoError>(available < 0 || bytes <= available,
                   "cannot write {}: {} bytes needed, {} bytes free on that file system",
                   path.string(), bytes, available);
}

File create_sized_file(const fs::path& path, std::int64_t size) {
  File file = File::create(path);
  int result = 0;
  do {
    result = ::fallocate(file.descriptor(), 0, 0, size);
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != ENOSPC && errno != EDQUOT && errno != EFBIG) {
    result = ::ftruncate(file.descriptor(), size);  // the file system cannot reserve space
  }
  if (result != 0) fail_write(path, static_cast<std::size_t>(size), errno);
  return file;
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

std::vector<fs::path> list_directory(const fs::path& dir) {
  std::error_code error;
  std::vector<fs::path> items = list_directory(dir, error);
  require<IoError>(!error, "cannot list {}: {}", dir.string(), error.message());
  return items;
}

std::vector<fs::path> list_directory(const fs::path& dir, std::error_code& error) {
  std::vector<fs::path> items;
  fs::directory_iterator item(dir, error);
  for (; !error && item != fs::directory_iterator(); item.increment(error)) {
    items.push_back(item->path());
  }
  std::sort(items.begin(), items.end());
  return items;
}

bool is_plain_name(std::string_view text) {
  return !text.empty() && text.size() <= 255 && text != "." && text != ".." &&
         text.find('/') == text.npos && text.find('\0') == text.npos;
}

}  // namespace tessera::io
