#pragma once

#include <fmt/format.h>
#include <regex.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>

#include "io/base/json.h"

namespace tessera::test {

/// Walks a value along a JSON schema (draft 2020-12). Knows the keywords that io/index.schema.json
/// uses, and throws std::runtime_error on any other.
class SchemaWalk {
 public:
  using Json = io::Json;
  explicit SchemaWalk(const Json& root) : root_(root) {}

  /// Where and how the value breaks the schema; empty if it does not.
  std::string check(const Json& schema, const Json& value, const std::string& place) {
    static const std::set<std::string> known = {"$schema",
                                                "$defs",
                                                "title",
                                                "description",
                                                "type",
                                                "required",
                                                "const",
                                                "$ref",
                                                "enum",
                                                "properties",
                                                "propertyNames",
                                                "items",
                                                "minItems",
                                                "maxItems",
                                                "minimum",
                                                "maximum",
                                                "pattern",
                                                "maxLength",
                                                "additionalProperties"};
    for (const auto& [keyword, unused] : schema.items()) {
      if (!known.contains(keyword)) throw std::runtime_error("schema keyword " + keyword);
    }
    const auto breaks = [&](const std::string& what) {
      return fmt::format("{}: {}: {}", place, what, value.dump().substr(0, 60));
    };
    if (schema.contains("$ref")) {
      const auto target = schema["$ref"].get<std::string>();
      const auto found = check(root_.at(Json::json_pointer(target.substr(1))), value, place);
      if (!found.empty()) return found;
    }
    if (schema.contains("type") && !has_type(value, schema["type"])) return breaks("type");
    if (schema.contains("const") && value != schema["const"]) return breaks("const");
    if (schema.contains("enum")) {
      bool found = false;
      for (const Json& choice : schema["enum"]) found |= value == choice;
      if (!found) return breaks("enum");
    }
    if (value.is_number() && schema.contains("minimum") && value < schema["minimum"]) {
      return breaks("minimum");
    }
    if (value.is_number() && schema.contains("maximum") && value > schema["maximum"]) {
      return breaks("maximum");
    }
    if (value.is_string()) {
      const auto text = value.get<std::string>();
      if (text.size() > schema.value("maxLength", text.size())) return breaks("maxLength");
      if (schema.contains("pattern") && !matches(text, schema["pattern"])) {
        return breaks("pattern");
      }
    }
    if (value.is_array()) {
      if (value.size() < schema.value("minItems", std::size_t{0})) return breaks("minItems");
      if (value.size() > schema.value("maxItems", value.size())) return breaks("maxItems");
      for (std::size_t i = 0; schema.contains("items") && i < value.size(); ++i) {
        const auto found = check(schema["items"], value[i], fmt::format("{}/{}", place, i));
        if (!found.empty()) return found;
      }
    }
    return value.is_object() ? check_object(schema, value, place) : "";
  }

 private:
  std::string check_object(const Json& schema, const Json& value, const std::string& place) {
    for (const Json& name : schema.value("required", Json::array())) {
      if (!value.contains(name)) return fmt::format("{}: lacks {}", place, name.dump());
    }
    const Json properties = schema.value("properties", Json::object());
    for (const auto& [name, member] : value.items()) {
      const std::string inside = place + "/" + name;
      std::string found;
      if (schema.contains("propertyNames")) found = check(schema["propertyNames"], name, inside);
      if (!found.empty()) return found;
      if (properties.contains(name)) {
        found = check(properties[name], member, inside);
      } else if (schema.contains("additionalProperties")) {
        const Json& others = schema["additionalProperties"];
        if (others == false) return inside + ": additionalProperties";
        if (others.is_object()) found = check(others, member, inside);
      }
      if (!found.empty()) return found;
    }
    return "";
  }

  static bool has_type(const Json& value, const std::string& type) {
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "integer") return value.is_number_integer();
    throw std::runtime_error("schema type " + type);
  }

  // By POSIX's expressions, for g++ 12 warns of std::regex's under the sanitizers. They end at a
  // NUL, which therefore goes as another character that no name here has.
  static bool matches(std::string text, std::string pattern) {
    for (std::size_t at; (at = pattern.find("\\u0000")) != std::string::npos;) {
      pattern.replace(at, 6, 1, '\x01');
    }
    std::replace(text.begin(), text.end(), '\0', '\x01');
    regex_t compiled;
    if (::regcomp(&compiled, pattern.c_str(), REG_EXTENDED | REG_NOSUB) != 0) {
      throw std::runtime_error("schema pattern " + pattern);
    }
    const bool found = ::regexec(&compiled, text.c_str(), 0, nullptr, 0) == 0;
    ::regfree(&compiled);
    return found;
  }

  const Json& root_;
};

/// Where and how an index.json breaks io/index.schema.json; empty if it does not.
inline std::string index_schema_violation(const io::Json& index) {
  static const io::Json schema = [] {
    std::ifstream file(TESSERA_SOURCE_DIR "/io/index.schema.json");
    return io::Json::parse(file);
  }();
  return SchemaWalk(schema).check(schema, index, "");
}

}  // namespace tessera::test
