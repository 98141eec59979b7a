#include "io/hf/config.h"

#include <array>

namespace tessera::io {
namespace {

constexpr const char* kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./-";

constexpr std::array<std::string_view, 3> kLiterals = {"NaN", "Infinity", "-Infinity"};

// The literal of Python's that a value begins with, or nothing; not where it would be a key.
std::string_view literal_at(std::string_view text) {
  for (const std::string_view literal : kLiterals) {
    if (!text.starts_with(literal)) continue;
    const std::size_t next = text.find_first_not_of(" \t\r\n", literal.size());
    if (next != std::string_view::npos &&
        (text[next] == ',' || text[next] == ']' || text[next] == '}'))
      return literal;
  }
  return {};
}

// As a JSON string that begins with U+E000, a character for private use.
std::string quoted(std::string_view literal) {
  return "\"\xEE\x80\x80" + std::string(literal) + '"';
}

void add_file(std::set<std::string>& files, const Json& reference) {
  if (!reference.is_string()) return;  // null: there is no fast tokenizer, or no slow one
  const std::string& text = reference.get_ref<const std::string&>();
  if (text.find("--") != std::string::npos) return;
  // Others are no module's, and might do something to the terminal that lists them.
  if (text.find_first_not_of(kPlain) != std::string::npos) return;
  const std::size_t dot = text.rfind('.');
  if (dot != std::string::npos && dot > 0) files.insert(text.substr(0, dot) + ".py");
}

}  // namespace

Json parse_hf_config(std::string_view text, const std::string& source) {
  std::string json;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size();) {
    const std::string_view literal = in_string ? "" : literal_at(text.substr(i));
    if (!literal.empty()) {
      json += quoted(literal);
      i += literal.size();
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    const std::size_t bytes = in_string && text[i] == '\\' ? 2 : 1;
    json += text.substr(i, bytes);
    i += bytes;
  }
  return parse_json(json, source);
}

std::string dump_hf_config(const Json& config) {
  std::string text = config.dump(2);
  for (const std::string_view literal : kLiterals) {
    const std::string from = quoted(literal);
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos;) {
      text.replace(at, from.size(), literal);
      at += literal.size();
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
  if (!found) config["torch_dtype"] = name;  // known to old and new versions
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
