#pragma once

#include <string>

namespace tessera::io {

/// Inspects the first 64 KiB of a data file. Ignores unreadable files, because opening them as data
/// reports the error.
/// @param tokens  true: a token file; false: text
/// @return a warning about suspicious content (control characters in text, ids spread evenly over
///   the vocabulary); empty: none
/// @throws IoError, with advice, if the file is of another format
std::string inspect_data_file(const std::string& path, bool tokens);

}  // namespace tessera::io
