#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "io/base/file.h"
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

/// Whether a token file has 32 bits per token. @throws as File::open and File::read
bool is_wide_token_file(const std::string& path);

/// Whether ids of a vocabulary need 32 bits in a token file.
constexpr bool needs_wide_tokens(std::int64_t vocab_size) { return vocab_size > 65536; }

/// A token file in the making, in the format of llm.c: `<path>.tmp`, renamed when it is whole.
class TokenFileWriter {
 public:
  static constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 31) - 1;

  /// Replaces `<path>.tmp`. @param wide  32 bits per token. @throws IoError
  TokenFileWriter(std::filesystem::path path, bool wide);
  /// Removes `<path>.tmp` unless it was committed.
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  std::int64_t tokens() const { return tokens_; }
  /// Appends little-endian ids of 2 or 4 bytes. @throws IoError
  void append(std::string_view ids);
  /// Syncs and renames. @return CRC-64 of the file. @throws IoError
  std::uint64_t commit();

 private:
  std::filesystem::path path_, temporary_;
  bool wide_;
  File file_;
  std::int64_t tokens_ = 0, synced_ = 0;
  std::uint64_t crc_ = 0;  // of the ids
};

/// Bytes of a file as tokens 0 to 255. @throws as open_token_file
TokenSourcePtr open_byte_file(const std::string& path);

}  // namespace tessera::io
