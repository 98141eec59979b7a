#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/shape.h"
#include "io/gguf/format.h"

namespace tessera::io {

/// Keys and values of a GGUF file, in order. A key is set once.
class GgufKeys {
 public:
  void add(std::string_view key, std::uint32_t value);
  void add(std::string_view key, float value);
  void add(std::string_view key, bool value);
  void add(std::string_view key, std::string_view value);
  void add(std::string_view key, const char* value) { add(key, std::string_view(value)); }
  void add(std::string_view key, const std::vector<std::string>& values);
  void add(std::string_view key, const std::vector<float>& values);
  void add(std::string_view key, const std::vector<std::int32_t>& values);
  void add(std::string_view key, const std::vector<bool>& values);

  /// Appends all keys of `other`.
  void append(const GgufKeys& other) {
    bytes_ += other.bytes_;
    count_ += other.count_;
  }

  std::uint64_t count() const { return count_; }
  const std::string& bytes() const { return bytes_; }

 private:
  void begin(std::string_view key, GgufType type);
  void begin_array(std::string_view key, GgufType type, std::size_t count);
  std::string bytes_;  // as in the file
  std::uint64_t count_ = 0;
};

struct GgufSpec {
  std::string name;
  Shape shape;  ///< the last dim is the innermost
  const GgufElements* elements = nullptr;
};

/// Layout of a file to write.
struct GgufPlan {
  std::string preamble;              ///< bytes before the data
  std::vector<std::int64_t> begins;  ///< byte in the file of each tensor
  std::int64_t file_size = 0;
};

/// Lays out a file with tensors in the given order.
/// @throws Unsupported on more than 4 dims, or over 2^63 bytes
GgufPlan plan_gguf(const GgufKeys& keys, const std::vector<GgufSpec>& tensors);

}  // namespace tessera::io
