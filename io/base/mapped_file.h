#pragma once

#include <cstddef>
#include <cstdint>

#include "io/base/file.h"

namespace tessera::io {

/// A regular file mapped for reading. Reads may run in several threads at once.
///
/// Mapped pages are the system's page cache: shared by all processes that map the file, taken back
/// when memory runs short, and not allocated by tessera, so no ledger counts them (the resident
/// size that the system reports for a process does).
///
/// Touching a page that cannot be read kills a process by SIGBUS. Reads here throw instead, for
/// they compare the file's size and have the pages brought in first. What remains is a file that is
/// cut, or a page that is evicted and then fails to come back, in the microseconds between that and
/// the end of the copy; and on Linux before 5.14, a device that fails.
class MappedFile {
 public:
  /// Maps the whole file, which stays open. Later growth is not seen.
  /// @throws IoError if the system refuses
  explicit MappedFile(File file);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const fs::path& path() const { return file_.path(); }
  /// Bytes, as of the construction.
  std::int64_t size() const { return size_; }

  /// Copies `bytes` from `offset`.
  /// @throws InvalidArgument outside [0, size()], IoError if the file became shorter than size()
  ///         (wherever the range lies) or its pages cannot be read
  void read(std::int64_t offset, void* data, std::size_t bytes) const;
  /// Has the system fetch a part of [0, size()] without waiting for it. Worth it for reads in an
  /// order that the system cannot foresee: it then reads no more than the range, and many at once.
  void prefetch(std::int64_t offset, std::int64_t bytes) const noexcept;

 private:
  void check_size() const;
  File file_;
  std::int64_t size_ = 0;
  std::byte* data_ = nullptr;  ///< null if the file is empty
};

}  // namespace tessera::io
