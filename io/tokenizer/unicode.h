#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::io {

/// Code point of the character at `text[i]`, which must be valid UTF-8.
char32_t code_point_at(std::string_view text, std::size_t i);
/// Length in bytes of a character, by its first byte.
inline std::size_t utf8_length(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

/// Offset of the first byte of a malformed UTF-8 sequence at or after `begin`; npos if there is none.
std::size_t find_malformed_utf8(std::string_view text, std::size_t begin = 0);
/// Replaces malformed sequences by U+FFFD, as Python's bytes.decode(errors="replace") does.
std::string replace_malformed_utf8(std::string_view text);

/// A text of the same length in bytes for matching regular expressions: bytes of malformed UTF-8
/// become U+001A, and characters newer than PCRE2's tables become others of the same category.
/// @return false if `text` needs no change; `masked` is then unspecified
bool mask_for_regex(std::string_view text, std::string& masked);

bool is_white_space(char32_t point);
/// General category N.
bool is_number(char32_t point);
/// General category P, or an ASCII symbol.
bool is_punctuation(char32_t point);
/// General category M.
bool is_mark(char32_t point);
/// \w of Rust's regular expressions.
bool is_word_character(char32_t point);

enum class NormalForm { NFC, NFD, NFKC, NFKD };
/// Unicode normalization of valid UTF-8.
std::string normalize_unicode(std::string_view text, NormalForm form);
/// Default lowercase mapping, character by character.
std::string lowercase_unicode(std::string_view text);
/// Simple uppercase mapping: of characters that become several, such as U+00DF, one.
std::string uppercase_unicode(std::string_view text);

}  // namespace tessera::io
