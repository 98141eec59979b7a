#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::io {

/// Length in bytes of the UTF-8 sequence at `text[i]`; 0 if it is malformed.
int utf8_sequence_length(std::string_view text, std::size_t i);

/// @throws InvalidArgument on the first invalid byte (including overlong forms and surrogates),
///   naming `name` and the byte's offset
std::u32string decode_utf8(std::string_view text, std::string_view name);

void append_utf8(char32_t code_point, std::string& out);

/// Formats a code point for messages: 'a' (U+0061).
std::string describe_character(char32_t code_point);

}  // namespace tessera::io
