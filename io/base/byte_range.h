#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "io/base/file.h"

namespace tessera::io {

/// Read-only view of a part of a file or of memory; does not own it. Threads may read concurrently.
class ByteRange {
 public:
  /// Bytes [offset, offset + size) of a file. @throws CorruptCheckpoint if the file is shorter
  ByteRange(const File& file, std::int64_t offset, std::int64_t size);
  /// @param name  used in errors
  ByteRange(std::string_view memory, std::string name);
  /// Bytes of which only the first and last are in memory. Reads of others are errors.
  ByteRange(std::string_view head, std::string_view tail, std::int64_t size, std::string name);

  std::int64_t size() const { return size_; }
  /// "run/__0_0.distcp, bytes 1577 to 3154"
  const std::string& name() const { return name_; }
  /// Offset of this range in the file; 0 for memory.
  std::int64_t offset() const { return offset_; }
  /// Reads exactly `bytes` from `offset`, which is relative to the range.
  /// @throws CorruptCheckpoint beyond the end of the range, or if they are not in memory; errors of
  ///         File::read
  void read(std::int64_t offset, void* data, std::size_t bytes) const;
  std::string read(std::int64_t offset, std::int64_t bytes) const;

 private:
  const File* file_ = nullptr;  // null: reads memory_
  std::string_view memory_, tail_;
  std::int64_t offset_ = 0;
  std::int64_t size_ = 0;
  std::string name_;
};

}  // namespace tessera::io
