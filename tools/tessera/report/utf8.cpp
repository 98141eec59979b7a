#include "tools/tessera/report/utf8.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::tools {

std::size_t character_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xF5   ? 0
                             : first >= 0xF0 ? 4
                             : first >= 0xE0 ? 3
                             : first >= 0xC2 ? 2
                                             : 0;
  for (std::size_t i = 1; i < std::min(length, text.size()); ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  if (text.size() == 1) return length;
  // Overlong encodings, surrogates, and code points above U+10FFFF.
  if ((first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
      (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F)) {
    return 0;
  }
  return length;
}

namespace {

// Code point of a whole character of three bytes.
unsigned code_point(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]) & 0x3FU; };
  return (byte(0) & 0x0FU) << 12U | byte(1) << 6U | byte(2);
}

// Whether a terminal reorders or breaks the text after it: directions and separators.
bool is_layout(unsigned c) {
  return c == 0x200E || c == 0x200F || (c >= 0x2028 && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069);
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    std::size_t length = character_length(text);
    const auto first = static_cast<unsigned char>(text[0]);
    const bool is_c1 = length == 2 && text.size() >= 2 && first == 0xC2 &&
                       static_cast<unsigned char>(text[1]) < 0xA0;
    if (length == 0 || length > text.size() || first < 0x20 || first == 0x7F || is_c1) {
      result += fmt::format("\\x{:02x}", first);
      length = 1;
    } else if (length == 3 && is_layout(code_point(text))) {
      result += fmt::format("\\u{:04x}", code_point(text));
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length);
  }
  return result;
}

std::string escaped_lines(std::string_view text) {
  std::string result;
  for (;;) {
    const std::size_t end = text.find('\n');
    result += escaped(text.substr(0, end));
    if (end == std::string_view::npos) return result;
    result += '\n';
    text.remove_prefix(end + 1);
  }
}

}  // namespace tessera::tools
