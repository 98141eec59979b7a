#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "io/base/file.h"

namespace tessera::io {

/// Alignment of offsets and memory that direct I/O needs on every common file system.
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

/// A file that is read or written once, past the page cache (O_DIRECT): faster for large pieces,
/// evicts no other pages, and leaves little for a final sync. Uses the page cache where the file
/// system has no direct I/O, and for ranges that are cached already. Threads may use disjoint
/// ranges concurrently.
class DirectFile {
 public:
  /// @param direct  false: always through the page cache
  explicit DirectFile(File file, bool direct = true);

  const File& file() const { return file_; }

  /// Reads exactly `bytes` from `offset`, at any alignment.
  /// @param scratch    at least bytes + 2 * kDirectAlignment
  /// @param preferred  room for the bytes, used where that saves a copy; may be null
  /// @return the bytes: at `preferred`, or somewhere in `scratch`
  /// @throws as File::read
  const char* read(std::int64_t offset, std::size_t bytes, const AlignedBuffer& scratch,
                   char* preferred) const;

  /// Writes at an offset. Offset and size are multiples of kDirectAlignment, except at the end of
  /// the file. Data that goes through the page cache is sent to disk at once.
  /// @param data  aligned as AlignedBuffer's. @throws as File::write_at
  void write(std::int64_t offset, const char* data, std::size_t bytes);
  /// Waits until all that was written is on the disk. @throws as File::sync
  void sync() { file_.sync(); }

 private:
  File file_;
  File direct_;  ///< the same file opened for direct I/O; empty: it can't be
  mutable std::atomic<bool> use_direct_{false};
};

/// Creates a file of `size` bytes, and reserves its space where the file system can do that.
/// @throws IoError, with bytes needed and bytes free if they do not fit
File create_sized_file(const fs::path& path, std::int64_t size);

}  // namespace tessera::io
