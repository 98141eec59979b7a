#pragma once

#include <string>

#include "io/safetensors/header.h"

namespace tessera::io {

/// A safetensors file, open for reading. Threads may read concurrently. Not mapped: truncation
/// while open gives an error instead of a SIGBUS, and misaligned tensors need no special case.
class SafetensorsReader {
 public:
  /// @throws IoError, or CorruptCheckpoint as read_safetensors_header
  explicit SafetensorsReader(const fs::path& path, Links links = Links::Follow)
      : file_(File::open(path, links)), header_(read_safetensors_header(file_)) {}

  const SafetensorsHeader& header() const { return header_; }
  const File& file() const { return file_; }

  /// Reads elements [begin, end) of a tensor, in row-major order, converted to `dtype`.
  /// @param out  room for end - begin elements of dtype, any alignment
  /// @throws InvalidArgument if there is no such tensor or the range is outside it,
  ///         Unsupported if the dtypes do not convert (see can_convert), IoError, CorruptCheckpoint
  void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
            DType dtype) const;

 private:
  File file_;
  SafetensorsHeader header_;
};

/// Reads n elements of `stored` at byte `offset` of a file and converts them to `dtype` in `out`,
/// with at most 1 MiB of scratch.
void read_elements(const File& file, std::int64_t offset, DType stored, std::int64_t n, DType dtype,
                   void* out);

}  // namespace tessera::io
