#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "io/base/file.h"

namespace tessera::io {

/// Bytes that are read by ranges: a part of a file, or memory. Does not own either. Threads may
/// read at once.
class ByteRange {
 public:
  /// Bytes [offset, offset + size) of a file. @throws CorruptCheckpoint unless they are inside it
  ByteRange(const File& file, std::int64_t offset, std::int64_t size);
  /// @param name  stands in errors in place of a file
  ByteRange(std::string_view memory, std::string name);

  std::int64_t size() const { return size_; }
  /// "run/__0_0.distcp, bytes 1577 to 3154"
  const std::string& name() const { return name_; }
  /// Position of this range in the file; 0 for memory.
  std::int64_t offset() const { return offset_; }
  /// Reads exactly `bytes` from `offset`, counted inside the range.
  /// @throws CorruptCheckpoint if they are not all inside the range; as File::read
  void read(std::int64_t offset, void* data, std::size_t bytes) const;
  std::string read(std::int64_t offset, std::int64_t bytes) const;

 private:
  const File* file_ = nullptr;  // null: memory_
  std::string_view memory_;
  std::int64_t offset_ = 0;
  std::int64_t size_ = 0;
  std::string name_;
};

}  // namespace tessera::io
