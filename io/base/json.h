#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tessera::io {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;  // keeps the order of keys

/// Parses strict JSON: UTF-8 without byte-order mark, no comments, no duplicate keys, no trailing
/// bytes, at most max_depth levels.
/// @param source  named in errors, usually the file
/// @throws CorruptCheckpoint
Json parse_json(std::string_view text, const std::string& source, int max_depth = 64);

OrderedJson parse_ordered_json(std::string_view text, const std::string& source,
                               int max_depth = 64);

/// JSON text, indented by 2. Bytes that are not UTF-8 become U+FFFD.
std::string dump_json(const Json& json);

/// Typed access to a JSON value, which must outlive this. Errors name the source, the path
/// ("sections.model.tensors") and the value found.
class JsonReader {
 public:
  JsonReader(const Json& value, std::string source) : value_(&value), source_(std::move(source)) {}

  const Json& value() const { return *value_; }
  /// "index.json: sections.model"
  std::string where() const;

  bool has(std::string_view key) const;
  /// @throws CorruptCheckpoint if this is not an object or lacks the key
  JsonReader at(std::string_view key) const;
  /// @throws CorruptCheckpoint if this is not an array or is shorter
  JsonReader at(std::size_t index) const;
  /// @throws CorruptCheckpoint if this is not an array
  std::size_t array_size() const;
  /// @throws CorruptCheckpoint if this is not an object
  const Json& object() const;
  const std::string& string() const;
  /// @throws CorruptCheckpoint unless it is an integer in [low, high], without fraction or exponent
  std::int64_t integer(std::int64_t low = 0,
                       std::int64_t high = std::numeric_limits<std::int64_t>::max()) const;

 private:
  JsonReader(const Json& value, std::string source, std::string place)
      : value_(&value), source_(std::move(source)), place_(std::move(place)) {}
  [[noreturn]] void expected(std::string_view what) const;
  const Json* value_;
  std::string source_;
  std::string place_;
};

}  // namespace tessera::io
