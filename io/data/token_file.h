#pragma once

#include <cstdint>
#include <string>

#include "io/data/token_source.h"

namespace tessera::io {

/// Opens a file of token ids. Its first four bytes tell the format:
///
///   llm.c, 16 bit   int32[256] header {20240520, 1, count}, then count uint16
///   llm.c, 32 bit   int32[256] header {20240801, 7, count}, then count uint32
///   nanoGPT         no header: uint16 to the end of the file
///
/// All little-endian. First words from 20240000 to 20249999 are llm.c's: in a raw file they would
/// be a token above 54911, beyond GPT-2's vocabulary of 50257.
///
/// @param vocab_size  larger ids are refused as they are read; 0: no limit but 2^31 - 1
///
/// The file is mapped, and its pages are shared by the ranks of a host. A file that is cut while
/// open makes the next read throw IoError; see MappedFile for the limits of that.
/// @throws CorruptCheckpoint if it is no regular file; IoError if it cannot be read, is empty, has
///   an unknown magic, version or count, or a size that does not match its header
TokenSourcePtr open_token_file(const std::string& path, std::int64_t vocab_size = 0);

/// The bytes of a file as tokens 0 to 255. @throws as open_token_file
TokenSourcePtr open_byte_file(const std::string& path);

}  // namespace tessera::io
