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
/// All little-endian. First words from 20240000 to 20249999 belong to llm.c alone: as two tokens of
/// a raw file their lower half would be above 54911, which GPT-2's vocabulary of 50257 hasn't.
///
/// @param vocab_size  ids from here on are refused as they are read; 0: no limit but 2^31 - 1
/// Read with pread, not mapped: a file that shrinks while training runs is an error instead of a
/// SIGBUS, and a row of a batch costs about a microsecond either way.
/// @throws CorruptCheckpoint if it is no regular file, IoError if it cannot be read, is empty, has
/// an unknown magic, version or count,
///   or a size that is not the one its header or element size asks for
TokenSourcePtr open_token_file(const std::string& path, std::int64_t vocab_size = 0);

/// The bytes of a file as tokens 0 to 255. @throws as open_token_file
TokenSourcePtr open_byte_file(const std::string& path);

}  // namespace tessera::io
