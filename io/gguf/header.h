#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/shape.h"
#include "io/base/file.h"
#include "io/base/json.h"
#include "io/gguf/format.h"

namespace tessera::io {

/// Maximum bytes before the data.
inline constexpr std::int64_t kMaxGgufHeader = std::int64_t{256} << 20;

struct GgufEntry {
  std::string name;
  const GgufElements* elements = nullptr;
  Shape shape;                      ///< the last dim is the innermost
  std::int64_t begin = 0, end = 0;  ///< bytes in the file
};

struct GgufHeader {
  /// Values by key: integers, floats, booleans, strings, and arrays of them. Strings may hold any
  /// bytes.
  std::map<std::string, Json, std::less<>> keys;
  std::vector<GgufEntry> tensors;  ///< in the order of their data
};

/// Whether a file begins as a GGUF file; false if it cannot be read.
bool is_gguf(const fs::path& file);

/// Reads and checks everything before the data of a GGUF file of version 2 or 3.
/// @throws CorruptCheckpoint naming file, key or tensor; Unsupported on another version, big-endian
///         files, and files that are a part of a model
GgufHeader read_gguf_header(const File& file);

}  // namespace tessera::io
