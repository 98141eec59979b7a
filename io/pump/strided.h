#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/base/shape.h"

namespace tessera::io {

/// A block of elements stored with any strides, such as a transposed tensor.
struct StridedBlock {
  std::int64_t begin = 0;  ///< offset of the first element in the file, in bytes
  std::int64_t width = 1;  ///< bytes of an element
  Shape shape;             ///< not empty
  Strides strides;         ///< in elements, none negative
};

using ReadBytes = std::function<void(std::int64_t offset, char* out, std::size_t bytes)>;

/// Reads elements [first, last) of a block, in row-major order of its shape. Merges nearby elements
/// into reads of up to 256 KiB, which it needs as scratch memory; larger requests merge better.
/// @param read  reads bytes of the file
void read_strided(const ReadBytes& read, const StridedBlock& block, std::int64_t first,
                  std::int64_t last, char* out);

}  // namespace tessera::io
