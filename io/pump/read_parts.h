#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// A range of elements to read, and its destination.
struct ReadPart {
  const TensorSource* source = nullptr;
  std::string name;
  std::int64_t begin = 0, end = 0;  ///< elements, row-major
  DType dtype = DType::F32;         ///< of the output
  void* data = nullptr;             ///< memory for end - begin elements; null: use `sink`
  /// Receives elements [begin, begin + n) of the tensor, at most 512 KiB of the stored dtype.
  /// Threads call it concurrently, for disjoint elements.
  std::function<void(std::int64_t begin, const void* values, std::int64_t n)> sink{};
};

struct ReadReport {
  std::int64_t wanted_bytes = 0;  ///< size of the parts in the stored dtype
  std::int64_t read_bytes = 0;    ///< includes the rest of their chunks, read for checksums
  double seconds = 0;
};

struct ReadOptions {
  int threads = 1;
  bool direct_io = true;
  /// Returns whether a chunk was verified before; if so, only the requested elements are read.
  std::function<bool(const std::string& name, std::size_t chunk)> is_verified{};
  std::function<void(const std::string& name, std::size_t chunk)> set_verified{};
};

/// Reads parts on several threads. Each chunk with requested elements is read once, completely, and
/// verified.
/// @throws InvalidArgument if parts overlap, or one is not in the source; Unsupported if dtypes do
///         not convert; IoError; CorruptCheckpoint naming file, tensor and elements of a chunk with
///         a wrong checksum. After an error the contents of the destinations are undefined.
ReadReport read_parts(std::span<const ReadPart> parts, const ReadOptions& options);

}  // namespace tessera::io
