#include "io/base/mapped_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

/// madvise of the pages that hold [begin, begin + bytes).
int advise(std::byte* begin, std::size_t bytes, int advice) {
  static const auto kPageBytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t before = reinterpret_cast<std::uintptr_t>(begin) % kPageBytes;
  return ::madvise(begin - before, bytes + before, advice);
}

}  // namespace

MappedFile::MappedFile(File file) : file_(std::move(file)), size_(file_.size()) {
  if (size_ == 0) return;
  void* const data = ::mmap(nullptr, static_cast<std::size_t>(size_), PROT_READ, MAP_SHARED,
                            file_.descriptor(), 0);
  if (data == MAP_FAILED) {
    throw IoError("cannot map the {} bytes of {}: {}", size_, path().string(),
                  std::strerror(errno));
  }
  data_ = static_cast<std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(size_));
}

void MappedFile::check_size() const {
  const std::int64_t now = file_.size();
  require<IoError>(now >= size_,
                   "{} has {} bytes, but had {} when it was opened: it was truncated while in use; "
                   "restore the file and resume from the newest checkpoint",
                   path().string(), now, size_);
}

void MappedFile::read(std::int64_t offset, void* data, std::size_t bytes) const {
  require(offset >= 0 && offset <= size_ && bytes <= static_cast<std::size_t>(size_ - offset),
          "{}: cannot read {} bytes at offset {}; the file has {}", path().string(), bytes, offset,
          size_);
  if (bytes == 0) return;
  check_size();
#ifdef MADV_POPULATE_READ
  // EFAULT: the copy below would raise SIGBUS. Other errors: the system lacks this advice.
  if (advise(data_ + offset, bytes, MADV_POPULATE_READ) != 0 && errno == EFAULT) {
    check_size();
    throw IoError("cannot read {}: the file system failed at bytes {} to {}; see the system log",
                  path().string(), offset, offset + static_cast<std::int64_t>(bytes));
  }
#endif
  std::memcpy(data, data_ + offset, bytes);
  // If the file was truncated during the copy, the rest of its last page read as zeros.
  check_size();
}

void MappedFile::prefetch(std::int64_t offset, std::int64_t bytes) const noexcept {
  if (bytes > 0) advise(data_ + offset, static_cast<std::size_t>(bytes), MADV_WILLNEED);
}

}  // namespace tessera::io
