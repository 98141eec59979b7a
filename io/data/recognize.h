#pragma once

#include <string>

namespace tessera::io {

/// Looks at the first 64 KiB of a data file. Does nothing with files that cannot be opened: opening
/// them as data reports that.
/// @param tokens  a token file, else text
/// @return what looks odd about the content (control characters in text, ids spread evenly over the
///   vocabulary); empty: nothing
/// @throws IoError if it is recognized as another format, with what to do
std::string inspect_data_file(const std::string& path, bool tokens);

}  // namespace tessera::io
