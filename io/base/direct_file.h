#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "io/base/file.h"

namespace tessera::io {

/// What direct I/O wants offsets and memory to be multiples of, on every common file system.
inline constexpr std::size_t kDirectAlignment = 4096;

/// Memory aligned for direct I/O. It is not touched, so pages that are never used cost nothing.
class AlignedBuffer {
 public:
  /// @param bytes  rounded up to a multiple of kDirectAlignment. @throws std::bad_alloc
  explicit AlignedBuffer(std::size_t bytes);
  char* data() const { return data_.get(); }
  std::size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
  std::size_t size_ = 0;
};

/// A file whose data passes once: read or written past the page cache (O_DIRECT), which for large
/// pieces is faster than through it, drops nobody else's pages, and leaves nothing for a final sync
/// to wait for. Goes through the page cache where the file system has no direct I/O, and for what
/// is in the cache anyway. Threads may use disjoint ranges at once.
class DirectFile {
 public:
  /// @param direct  false: always through the page cache
  explicit DirectFile(File file, bool direct = true);

  const File& file() const { return file_; }

  /// Reads exactly `bytes` from `offset`, at any alignment.
  /// @param scratch    at least bytes + 2 * kDirectAlignment
  /// @param preferred  room for the bytes, or null; taken where it spares a copy
  /// @return where the bytes are: `preferred`, or somewhere in `scratch`
  /// @throws as File::read
  const char* read(std::int64_t offset, std::size_t bytes, const AlignedBuffer& scratch,
                   char* preferred) const;

  /// Writes at an offset. Only the end of the file may be no multiple of kDirectAlignment.
  /// What goes through the page cache is sent on its way to the disk at once.
  /// @param data  aligned as AlignedBuffer's. @throws as File::write_at
  void write(std::int64_t offset, const char* data, std::size_t bytes);
  /// The same through the page cache, at any alignment.
  void write_buffered(std::int64_t offset, const char* data, std::size_t bytes);

  /// Whether all these bytes are in the page cache; false if unknown.
  bool is_cached(std::int64_t offset, std::size_t bytes) const;

  /// Lets the system copy bytes here (copy_file_range), as servers of network file systems do among
  /// themselves. Nothing checks what it copies.
  /// @return false if it does not: it cannot between these two, or one has failed. Reading and
  ///   writing say what is wrong, if anything is
  bool copy_from(const File& source, std::int64_t from, std::int64_t to,
                 std::size_t bytes) noexcept;

  /// Waits until all that was written is on the disk. @throws as File::sync
  void sync() { file_.sync(); }

 private:
  File file_;
  File direct_;  ///< the same file opened for direct I/O; empty: it can't be
  mutable std::atomic<bool> use_direct_{false};
};

/// Makes a new file of `size` bytes, with its space reserved where the file system can do that.
/// @throws IoError, with bytes needed and bytes free if they do not fit
File create_sized_file(const fs::path& path, std::int64_t size);

}  // namespace tessera::io
