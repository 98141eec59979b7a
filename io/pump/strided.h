#pragma once

#include <cstdint>

#include "core/base/shape.h"
#include "io/base/file.h"

namespace tessera::io {

/// A block of elements stored with any strides, such as a transposed tensor.
struct StridedBlock {
  std::int64_t begin = 0;  ///< offset of the first element in the file, in bytes
  std::int64_t width = 1;  ///< bytes of an element
  Shape shape;             ///< not empty
  Strides strides;         ///< in elements, none negative
};

/// Reads elements [first, last) of a block, in row-major order of its shape. Merges nearby elements
/// into reads of up to 256 KiB, which it needs as scratch memory; larger requests merge better.
/// @throws as File::read
void read_strided(const File& file, const StridedBlock& block, std::int64_t first,
                  std::int64_t last, char* out);

}  // namespace tessera::io
