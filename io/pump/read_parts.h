#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Elements of a tensor to read, and their destination.
struct ReadPart {
  const TensorSource* source = nullptr;
  std::string name;
  std::int64_t begin = 0, end = 0;  ///< elements, row-major
  DType dtype = DType::F32;         ///< of what is handed over
  void* data = nullptr;             ///< room for end - begin elements; null: they go to the sink
  /// Receives elements [begin, begin + n) of the tensor, at most 512 KiB of the stored dtype at a
  /// time. Threads call it concurrently, each for other elements.
  std::function<void(std::int64_t begin, const void* values, std::int64_t n)> sink{};
};

struct ReadReport {
  std::int64_t wanted_bytes = 0;  ///< of the parts, as stored
  std::int64_t read_bytes = 0;    ///< the same and the rest of chunks of which a part is wanted
  double seconds = 0;
};

struct ReadOptions {
  int threads = 1;
  bool direct_io = true;
  /// Whether a chunk was verified before: only the wanted part of it is read then.
  std::function<bool(const std::string& name, std::size_t chunk)> is_verified{};
  std::function<void(const std::string& name, std::size_t chunk)> set_verified{};
};

/// Reads parts on several threads. Every chunk that a part lies in is read once, in whole, and
/// verified.
/// @throws InvalidArgument if parts overlap, or one is not in the source; Unsupported if dtypes do
///         not convert; IoError; CorruptCheckpoint naming file, tensor and elements of a chunk
///         whose checksum is wrong. What the memory holds after an error must not be used.
ReadReport read_parts(std::span<const ReadPart> parts, const ReadOptions& options);

}  // namespace tessera::io
