#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tessera::io {

using Json = nlohmann::json;

/// Parses strict JSON: UTF-8 without byte-order mark, no comments, no duplicate keys, no trailing
/// bytes, at most max_depth levels.
/// @param source  named in errors, usually the file
/// @throws CorruptCheckpoint
Json parse_json(std::string_view text, const std::string& source, int max_depth = 64);

/// JSON text, indented by 2. Bytes that are not UTF-8, as in names of files, become U+FFFD.
std::string dump_json(const Json& json);

/// Reads an expected structure from a JSON value. Errors name the source, the place
/// ("sections.model.tensors") and the value found. The JSON value must outlive this.
class JsonReader {
 public:
  JsonReader(const Json& value, std::string source) : value_(&value), source_(std::move(source)) {}

  const Json& value() const { return *value_; }
  /// "index.json: sections.model"
  std::string where() const;

  bool has(std::string_view key) const;
  /// @throws CorruptCheckpoint if this is no object or lacks the key
  JsonReader at(std::string_view key) const;
  /// @throws CorruptCheckpoint if this is no array or is shorter
  JsonReader at(std::size_t index) const;
  /// Entries of an array. @throws CorruptCheckpoint if it is none
  std::size_t array_size() const;
  /// @throws CorruptCheckpoint if this is no object
  const Json& object() const;
  const std::string& string() const;
  /// A whole number in [low, high]; numbers with a fraction or an exponent are refused.
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
