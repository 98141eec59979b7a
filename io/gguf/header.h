#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/shape.h"
#include "io/base/file.h"
#include "io/base/json.h"
#include "io/gguf/format.h"

namespace tessera::io {

/// Maximum bytes before the data.
inline constexpr std::int64_t kMaxGgufHeader = std::int64_t{64} << 20;
/// Maximum number of keys, and of tensors.
inline constexpr std::uint64_t kMaxGgufEntries = std::uint64_t{1} << 18;

struct GgufEntry {
  std::string name;
  const GgufElements* elements = nullptr;
  Shape shape;                      ///< the last dim is the innermost
  std::int64_t begin = 0, end = 0;  ///< bytes in the file
};

/// Values that stay in the file.
struct GgufArray {
  GgufType type = GgufType::U8;
  std::uint64_t count = 0;
  std::int64_t begin = 0;  ///< byte in the file
};

struct GgufHeader {
  /// Values by key: integers, floats, booleans, strings, and an empty array for each array. Strings
  /// may hold any bytes.
  Json keys = Json::object();
  std::map<std::string, GgufArray, std::less<>> arrays;  ///< by key
  std::vector<GgufEntry> tensors;                        ///< in the order of their data
};

/// Whether a file begins as a GGUF file; false if it cannot be read.
bool is_gguf(const fs::path& file);

/// Reads and checks everything before the data of a GGUF file of version 2 or 3.
/// @throws CorruptCheckpoint naming file, key or tensor; Unsupported on another version, big-endian
///         files, and files that are a part of a model
GgufHeader read_gguf_header(const File& file);

/// Visits the strings of an array in order. A visited string lives until the visit returns.
/// @throws CorruptCheckpoint naming file and key if there is no such array of strings
void visit_gguf_strings(const File& file, const GgufHeader& header, const std::string& key,
                        const std::function<void(std::string_view)>& visit);
/// Reads an array of integers or floats.
/// @throws CorruptCheckpoint naming file and key unless it has `count` numbers
std::vector<double> read_gguf_numbers(const File& file, const GgufHeader& header,
                                      const std::string& key, std::uint64_t count);

}  // namespace tessera::io
