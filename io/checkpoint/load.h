#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "io/checkpoint/reader.h"

namespace tessera::io {

/// Elements of a tensor that somebody wants, and where they go.
struct LoadPart {
  Section section = Section::Model;
  std::string name;
  std::int64_t begin = 0, end = 0;  ///< elements, row-major
  DType dtype = DType::F32;         ///< of what is handed over
  void* data = nullptr;             ///< room for end - begin elements; null: they go to the sink
  /// Receives elements [begin, begin + n) of the tensor, at most 512 KiB of the stored dtype at a
  /// time. Threads call it at once, each for other elements.
  std::function<void(std::int64_t begin, const void* values, std::int64_t n)> sink{};
};

struct LoadReport {
  std::int64_t wanted_bytes = 0;  ///< of the parts, as stored
  std::int64_t read_bytes = 0;    ///< the same and the rest of chunks of which a part is wanted
  double seconds = 0;
};

/// Reads parts of a checkpoint on several threads, each through a buffer that the disk fills past
/// the page cache; from it values go to their place at once, converted where dtypes differ. Every
/// chunk that a part lies in is read once, in whole, and checked as it is read.
/// @param threads  that read, the caller among them
/// @throws InvalidArgument if parts overlap, or one is not in the checkpoint; Unsupported if dtypes
///         do not convert; IoError; CorruptCheckpoint naming file, tensor and elements of a chunk
///         whose checksum is wrong. What the memory holds after an error must not be used.
LoadReport load_parts(const CheckpointReader& reader, std::span<const LoadPart> parts, int threads);

}  // namespace tessera::io
