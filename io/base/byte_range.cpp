#include "io/base/byte_range.h"

#include <cstring>

#include "core/base/error.h"

namespace tessera::io {

ByteRange::ByteRange(const File& file, std::int64_t offset, std::int64_t size)
    : file_(&file), offset_(offset), size_(size) {
  const std::int64_t file_size = file.size();
  require<CorruptCheckpoint>(
      offset >= 0 && size >= 0 && offset <= file_size && size <= file_size - offset,
      "{} has {} bytes; cannot read {} bytes at offset {}: it was truncated or replaced",
      file.path().string(), file_size, size, offset);
  name_ = fmt::format("{}, bytes {} to {}", file.path().string(), offset, offset + size);
}

ByteRange::ByteRange(std::string_view memory, std::string name)
    : memory_(memory), size_(static_cast<std::int64_t>(memory.size())), name_(std::move(name)) {}

ByteRange::ByteRange(std::string_view head, std::string_view tail, std::int64_t size,
                     std::string name)
    : memory_(head), tail_(tail), size_(size), name_(std::move(name)) {}

void ByteRange::read(std::int64_t offset, void* data, std::size_t bytes) const {
  require<CorruptCheckpoint>(
      offset >= 0 && offset <= size_ && bytes <= static_cast<std::uint64_t>(size_ - offset),
      "{}: cannot read {} bytes at offset {} of {}", name_, bytes, offset, size_);
  if (bytes == 0) return;
  if (file_) {
    file_->read(offset_ + offset, data, bytes);
    return;
  }
  const std::string_view part =
      offset + static_cast<std::int64_t>(bytes) <= std::ssize(memory_) ? memory_ : tail_;
  const std::int64_t first = part.data() == memory_.data() ? 0 : size_ - std::ssize(tail_);
  require<CorruptCheckpoint>(offset >= first, "{}: {} bytes at {} are not metadata at its ends",
                             name_, bytes, offset);
  std::memcpy(data, part.data() + (offset - first), bytes);
}

std::string ByteRange::read(std::int64_t offset, std::int64_t bytes) const {
  require<CorruptCheckpoint>(
      offset >= 0 && bytes >= 0 && offset <= size_ && bytes <= size_ - offset,
      "{}: cannot read {} bytes at offset {} of {}", name_, bytes, offset, size_);
  std::string content(static_cast<std::size_t>(bytes), '\0');
  read(offset, content.data(), content.size());
  return content;
}

}  // namespace tessera::io
