#pragma once

#include <cstddef>
#include <cstdint>

#include "io/base/file.h"

namespace tessera::io {

/// A regular file mapped for reading. Threads may read concurrently.
///
/// Mapped pages belong to the page cache: shared by all processes, evictable, and counted in the
/// process's resident size but in no memory ledger.
///
/// Touching an unreadable page raises SIGBUS. read() checks the file's size and populates the pages
/// first, and throws instead. SIGBUS remains possible if the file is truncated, or a page evicted
/// and then unreadable, within the microseconds of the copy; and on Linux before 5.14 if the device
/// fails.
class MappedFile {
 public:
  /// Maps the whole file, which stays open. Later growth is not visible.
  /// @throws IoError if mmap fails
  explicit MappedFile(File file);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const fs::path& path() const { return file_.path(); }
  /// Bytes at construction.
  std::int64_t size() const { return size_; }

  /// Copies `bytes` from `offset`.
  /// @throws InvalidArgument outside [0, size()], IoError if the file is now shorter than size()
  ///         or its pages cannot be read
  void read(std::int64_t offset, void* data, std::size_t bytes) const;
  /// Starts reading a part of [0, size()] into the page cache. Speeds up reads in random order,
  /// which the system's read-ahead serves badly.
  void prefetch(std::int64_t offset, std::int64_t bytes) const noexcept;

 private:
  void check_size() const;
  File file_;
  std::int64_t size_ = 0;
  std::byte* data_ = nullptr;  ///< null if the file is empty
};

}  // namespace tessera::io
