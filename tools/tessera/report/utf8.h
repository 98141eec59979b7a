#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::tools {

/// Bytes of the UTF-8 character that a text, which is not empty, starts with: more than text.size()
/// if its end is missing, 0 if no character starts so.
std::size_t character_length(std::string_view text);

/// A line of text with `\xNN` in place of each byte that is no part of a UTF-8 character, or that
/// would control a terminal: what comes from a damaged file may hold any bytes.
std::string escaped(std::string_view text);
/// The same of several lines, which stay.
std::string escaped_lines(std::string_view text);

}  // namespace tessera::tools
