#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/file.h"
#include "io/base/json.h"

namespace tessera::io {

/// Maximum size of the JSON header, in bytes, for reading and writing.
inline constexpr std::int64_t kMaxSafetensorsHeader = 100'000'000;
/// Maximum length of a tensor name, in bytes.
inline constexpr std::size_t kMaxTensorName = 4096;

struct SafetensorsEntry {
  std::string name;
  std::string stored_dtype;    ///< as in the file: "F32", "F8_E4M3"
  std::optional<DType> dtype;  ///< empty if tessera lacks it, so that the tensor is unreadable
  Shape shape;
  std::int64_t begin = 0;  ///< first byte in the file
  std::int64_t end = 0;    ///< one past the last byte
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;  ///< `__metadata__`
  std::vector<SafetensorsEntry> tensors;        ///< in file order
  std::int64_t file_size = 0;                   ///< bytes
  std::int64_t size = 0;                        ///< bytes before the data
  std::uint64_t crc64 = 0;                      ///< CRC-64 of the bytes before the data
};

/// Parses an array of at most Shape::kMaxDims sizes. @throws CorruptCheckpoint
Shape parse_shape(const JsonReader& json);
/// Parses an array [begin, end]. @throws CorruptCheckpoint
std::pair<std::int64_t, std::int64_t> parse_range(const JsonReader& json);

/// Reads and validates the header of a safetensors file, which must describe every byte of the file
/// exactly once. Reads no tensor data.
/// @throws CorruptCheckpoint naming the file, the tensor, and the inconsistent values
SafetensorsHeader read_safetensors_header(const File& file);

}  // namespace tessera::io
