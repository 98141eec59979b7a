#include "io/hf/config.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "io/base/json.h"

namespace tessera::io {
namespace {

constexpr const char* kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./-";

constexpr std::array<std::string_view, 3> kLiterals = {"NaN", "Infinity", "-Infinity"};

constexpr std::string_view kDigits = "0123456789";
// Start of the JSON string that replaces a literal: a quote and U+E000, a private-use character.
constexpr std::string_view kLiteralMark = "\"\xEE\x80\x80";

// Whether a token is an integer of so many digits that it may exceed 64 bits.
bool is_large_integer(std::string_view token) {
  constexpr std::size_t kMostDigits = 18;
  if (token.starts_with('-')) token.remove_prefix(1);
  return token.size() > kMostDigits && token.front() != '0' &&
         token.find_first_not_of(kDigits) == std::string_view::npos;
}

bool is_literal(std::string_view token) {
  return std::ranges::find(kLiterals, token) != kLiterals.end() || is_large_integer(token);
}

// Leading word or number of the text, at least one character.
std::string_view token_at(std::string_view text) {
  const std::size_t end =
      text.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-._");
  return text.substr(0, std::max<std::size_t>(1, std::min(end, text.size())));
}

// Whether the token before `text` is a value, not a key.
bool ends_value(std::string_view text) {
  const std::size_t next = text.find_first_not_of(" \t\r\n");
  return next != std::string_view::npos &&
         (text[next] == ',' || text[next] == ']' || text[next] == '}');
}

void add_file(std::set<std::string>& files, const Json& reference) {
  if (!reference.is_string()) return;  // null if there is no fast or no slow tokenizer
  const std::string& text = reference.get_ref<const std::string&>();
  if (text.find("--") != std::string::npos) return;
  // Ignores texts that are not names of modules, because they could contain terminal escapes.
  if (text.find_first_not_of(kPlain) != std::string::npos) return;
  const std::size_t dot = text.rfind('.');
  if (dot != std::string::npos && dot > 0) files.insert(text.substr(0, dot) + ".py");
}

}  // namespace

Json parse_hf_config(std::string_view text, const std::string& source) {
  std::string json;
  bool in_string = false;
  while (!text.empty()) {
    if (text[0] == '"') in_string = !in_string;
    const std::string_view token = !in_string        ? token_at(text)
                                   : text[0] == '\\' ? text.substr(0, 2)
                                                     : text.substr(0, 1);
    text.remove_prefix(token.size());
    if (!in_string && is_literal(token) && ends_value(text)) {
      json += kLiteralMark;
      json += token;
      json += '"';
    } else {
      json += token;
    }
  }
  return parse_json(json, source);
}

std::string dump_hf_config(const Json& config) {
  const std::string json = config.dump(2);
  std::string text;
  for (std::size_t at = 0; at < json.size();) {
    const std::size_t mark = std::min(json.find(kLiteralMark, at), json.size());
    text.append(json, at, mark - at);
    at = mark;
    if (mark == json.size()) break;
    const std::size_t begin = mark + kLiteralMark.size(), end = json.find('"', begin);
    const std::string_view token = std::string_view(json).substr(begin, end - begin);
    const bool is_value = (mark == 0 || json[mark - 1] != '\\') && json[end + 1] != ':';
    if (is_value && is_literal(token)) {
      text += token;
      at = end + 1;
    } else {  // a string that only looks like a literal
      text += kLiteralMark;
      at = begin;
    }
  }
  return text;
}

std::string_view torch_dtype_name(DType dtype) {
  return dtype == DType::BF16  ? "bfloat16"
         : dtype == DType::F16 ? "float16"
         : dtype == DType::F64 ? "float64"
                               : "float32";
}

bool is_headless(const Json& config) {
  const auto names = config.find("architectures");
  if (names == config.end() || !names->is_array() || names->empty() || !names->front().is_string())
    return false;
  const std::string& name = names->front().get_ref<const std::string&>();
  return name.ends_with("Model") && name.find("Head") == std::string::npos;  // GPT2LMHeadModel
}

void set_torch_dtype(Json& config, DType dtype) {
  const Json name(torch_dtype_name(dtype));
  bool found = false;
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (config.contains(key)) {
      config[key] = name;
      found = true;
    }
    const auto text = config.find("text_config");
    if (text != config.end() && text->is_object() && text->contains(key)) (*text)[key] = name;
  }
  if (!found) config["torch_dtype"] = name;  // all versions of transformers read it
}

std::set<std::string> auto_map_files(const Json& config) {
  std::set<std::string> files;
  if (!config.is_object()) return files;
  const auto map = config.find("auto_map");
  if (map == config.end() || !map->is_object()) return files;
  for (const Json& reference : *map) {
    if (reference.is_array()) {
      for (const Json& each : reference) add_file(files, each);
    } else {
      add_file(files, reference);
    }
  }
  return files;
}

}  // namespace tessera::io
