#include "io/data/text.h"

#include "core/base/error.h"

namespace tessera::io {

// Source: Unicode 15, table 3-7, "Well-Formed UTF-8 Byte Sequences".
int utf8_sequence_length(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t k) -> unsigned {
    return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0U;
  };
  const auto continues = [&](std::size_t k) { return (byte(k) & 0xC0U) == 0x80U; };
  const unsigned b0 = byte(0);
  const unsigned b1 = byte(1);
  if (b0 < 0x80) return 1;
  if (b0 < 0xC2 || !continues(1)) return 0;
  if (b0 < 0xE0) return 2;
  if (b0 < 0xF0) {
    if ((b0 == 0xE0 && b1 < 0xA0) || (b0 == 0xED && b1 > 0x9F)) return 0;
    return continues(2) ? 3 : 0;
  }
  if (b0 > 0xF4 || (b0 == 0xF0 && b1 < 0x90) || (b0 == 0xF4 && b1 > 0x8F)) return 0;
  return continues(2) && continues(3) ? 4 : 0;
}

std::u32string decode_utf8(std::string_view text, std::string_view name) {
  std::u32string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const int length = utf8_sequence_length(text, i);
    require(
        length > 0,
        "{}: byte {} (0x{:02x}) is not valid UTF-8; use data.tokenizer=bytes, which accepts any "
        "file, or convert the text",
        name, i, static_cast<unsigned char>(text[i]));
    char32_t point = static_cast<unsigned char>(text[i]);
    if (length > 1) point &= 0x7FU >> length;
    for (int k = 1; k < length; ++k) {
      point = (point << 6) |
              (static_cast<unsigned char>(text[i + static_cast<std::size_t>(k)]) & 0x3FU);
    }
    out.push_back(point);
    i += static_cast<std::size_t>(length);
  }
  return out;
}

void append_utf8(char32_t point, std::string& out) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (point < 0x80) return put(point);
  const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;  // bytes after the first
  put((0xFFU << (7 - more)) | (point >> (6 * more)));
  for (int i = more - 1; i >= 0; --i) put(0x80U | ((point >> (6 * i)) & 0x3FU));
}

std::string describe_character(char32_t point) {
  std::string out;
  if (point >= 0x20 && point != 0x7F) {
    out += '\'';
    append_utf8(point, out);
    out += "' ";
  }
  return out + fmt::format("(U+{:04X})", static_cast<std::uint32_t>(point));
}

}  // namespace tessera::io
