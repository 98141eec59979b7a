#pragma once

#include <cstdint>

#include "core/base/shape.h"
#include "io/base/file.h"

namespace tessera::io {

/// A block of elements that lie in a file with any strides, as a transposed or permuted tensor's.
struct StridedBlock {
  std::int64_t begin = 0;  ///< byte of the first
  std::int64_t width = 1;  ///< bytes of an element
  Shape shape;             ///< not empty
  Strides strides;         ///< in elements, none negative
};

/// Reads elements [first, last) of a block, counted row-major in its shape, in that order. Takes
/// neighbours in the file at once, in at most 256 KiB beside `out`: the more elements are asked for
/// at once, the longer these runs are.
/// @throws as File::read
void read_strided(const File& file, const StridedBlock& block, std::int64_t first,
                  std::int64_t last, char* out);

}  // namespace tessera::io
