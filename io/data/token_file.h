#pragma once

#include <cstdint>
#include <string>

#include "io/data/token_source.h"

namespace tessera::io {

/// Opens a file of token ids. The first four bytes determine the format:
///
///   llm.c, 16 bit   int32[256] header {20240520, 1, count}, then count uint16
///   llm.c, 32 bit   int32[256] header {20240801, 7, count}, then count uint32
///   nanoGPT         no header: uint16 to the end of the file
///
/// All are little-endian. A file whose first 32 bits are from 20240000 to 20249999 is llm.c's. In
/// nanoGPT's format their lower half would be the first token, at least 54912, which is beyond
/// a vocabulary of 50257.
///
/// Reads through the page cache, which the ranks of a host share. If the file is truncated while
/// open, the next read throws IoError.
/// @param vocab_size  reading a larger id throws; 0: ids up to 2^31 - 1
/// @throws CorruptCheckpoint if it is not a regular file; IoError if it is unreadable, empty, has
///   an unknown magic, version or count, or a size that contradicts its header
TokenSourcePtr open_token_file(const std::string& path, std::int64_t vocab_size = 0);

/// Bytes of a file as tokens 0 to 255. @throws as open_token_file
TokenSourcePtr open_byte_file(const std::string& path);

}  // namespace tessera::io
