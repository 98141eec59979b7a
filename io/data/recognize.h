#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::io {

/// Inspects the first 64 KiB of a data file. Ignores unreadable files, because opening them as data
/// reports the error.
/// @param tokens  true: a token file; false: text
/// @return a warning about suspicious content (control characters in text, ids spread evenly over
///   the vocabulary); empty: none
/// @throws IoError, with advice, if the file is of another format
std::string inspect_data_file(const std::string& path, bool tokens);

inline constexpr std::size_t kInspectedBytes = std::size_t{64} << 10;

/// The same for the first bytes of a file, which may be decompressed.
/// @param path  decides what the bytes should be, and is named in messages
std::string inspect_data(const std::string& path, std::string_view head, bool tokens);

}  // namespace tessera::io
