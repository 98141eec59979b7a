#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::tools {

/// Length of the UTF-8 character at the start of a non-empty text: above text.size() if truncated,
/// 0 if invalid.
std::size_t character_length(std::string_view text);

/// Makes a line safe for a terminal: invalid UTF-8 and control characters become `\xNN`, and
/// characters that change the direction of text `\uNNNN`.
std::string escaped(std::string_view text);
/// The same, but keeps newlines.
std::string escaped_lines(std::string_view text);

}  // namespace tessera::tools
