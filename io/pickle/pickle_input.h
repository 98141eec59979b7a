#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "io/base/byte_range.h"

namespace tessera::io {

/// Sequential reads of a range of bytes through a small buffer. The caller checks left() first.
class PickleInput {
 public:
  explicit PickleInput(const ByteRange& bytes) : bytes_(bytes) {}

  std::uint64_t size() const { return static_cast<std::uint64_t>(bytes_.size()); }
  std::uint64_t position() const { return window_ + at_; }
  std::uint64_t left() const { return size() - position(); }
  void seek(std::uint64_t position) {
    window_ = position;
    at_ = end_ = 0;
  }
  void skip(std::uint64_t n) {
    if (n <= end_ - at_)
      at_ += static_cast<std::size_t>(n);
    else
      seek(position() + n);
  }
  void read(void* out, std::size_t n) {
    auto* to = static_cast<char*>(out);
    while (n > 0) {
      if (at_ == end_) fill();
      const std::size_t part = std::min(n, end_ - at_);
      std::memcpy(to, buffer_.get() + at_, part);
      at_ += part;
      to += part;
      n -= part;
    }
  }

 private:
  static constexpr std::size_t kBuffer = std::size_t{64} << 10;
  void fill() {
    seek(position());
    end_ = static_cast<std::size_t>(std::min<std::uint64_t>(kBuffer, size() - window_));
    bytes_.read(static_cast<std::int64_t>(window_), buffer_.get(), end_);
  }

  const ByteRange& bytes_;
  std::unique_ptr<char[]> buffer_{new char[kBuffer]};
  std::uint64_t window_ = 0;  // position of the buffer's first byte
  std::size_t at_ = 0, end_ = 0;
};

}  // namespace tessera::io
