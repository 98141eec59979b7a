#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::tools {

/// Length of the UTF-8 character at the start of a non-empty text: more than text.size() if it is
/// cut, 0 if it is not UTF-8.
std::size_t character_length(std::string_view text);

/// A line safe for a terminal: bytes that are not UTF-8 and control characters become `\xNN`.
std::string escaped(std::string_view text);
/// The same for several lines; newlines stay.
std::string escaped_lines(std::string_view text);

}  // namespace tessera::tools
