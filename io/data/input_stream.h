#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tessera::io {

/// Bytes of a file from its start, decompressed if its name ends in .gz, .zst or .zstd.
class InputStream {
 public:
  virtual ~InputStream() = default;
  /// Reads up to `bytes` more, fewer only at the end.
  /// @throws IoError on an I/O error; CorruptCheckpoint on a damaged or truncated stream, with the number
  ///   of bytes decoded; Unsupported on a zstd dictionary or a window above 128 MiB
  virtual std::size_t read(char* out, std::size_t bytes) = 0;
  /// Bytes of the file read so far, compressed if it is.
  virtual std::int64_t consumed() const = 0;
};

/// @throws IoError, CorruptCheckpoint as File::open
std::unique_ptr<InputStream> open_input(const std::string& path);

/// The path without .gz, .zst or .zstd at its end.
std::string without_compression(const std::string& path);

}  // namespace tessera::io
