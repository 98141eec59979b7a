#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "io/base/file.h"

namespace tessera::io {

/// Alignment of offsets and memory that satisfies direct I/O on every common file system.
inline constexpr std::size_t kDirectAlignment = 4096;

/// Memory aligned for direct I/O. Unused pages are never touched and cost nothing.
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

/// A file read or written once, bypassing the page cache (O_DIRECT): large transfers are faster, no
/// other pages are evicted, and the final sync is short. Uses the page cache if the file system has
/// no direct I/O, and for ranges that are already cached. Threads may use disjoint ranges
/// concurrently.
class DirectFile {
 public:
  /// @param direct  false: always use the page cache
  explicit DirectFile(File file, bool direct = true);

  const File& file() const { return file_; }

  /// Reads exactly `bytes` from `offset`, at any alignment.
  /// @param scratch    buffer of at least bytes + 2 * kDirectAlignment
  /// @param preferred  destination of `bytes` bytes, used where that saves a copy; may be null
  /// @return the data: at `preferred`, or inside `scratch`
  /// @throws as File::read
  const char* read(std::int64_t offset, std::size_t bytes, const AlignedBuffer& scratch,
                   char* preferred) const;

  /// Writes at an offset. Offset and size are multiples of kDirectAlignment, except at the end of
  /// the file. If data went to the page cache, starts its writeback.
  /// @param data  aligned to kDirectAlignment. @throws as File::write_at
  void write(std::int64_t offset, const char* data, std::size_t bytes);
  /// Replaces a few written bytes, at any alignment, through the page cache.
  void patch(std::int64_t offset, const void* data, std::size_t bytes) {
    file_.write_at(offset, data, bytes);
  }
  /// @throws as File::sync
  void sync() { file_.sync(); }

 private:
  File file_;
  File direct_;  ///< the same file opened with O_DIRECT; empty if unsupported
  mutable std::atomic<bool> use_direct_{false};
};

}  // namespace tessera::io
