#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/data/corpus.h"
#include "io/data/token_index.h"
#include "io/data/tokenizer.h"

namespace tessera::io {

struct TokenizeProgress {
  std::int64_t done = 0;  ///< bytes of the sources, compressed if they are
  std::int64_t total = 0;
  std::int64_t found = 0;   ///< part of `done` that earlier processes tokenized
  std::int64_t tokens = 0;  ///< of this process
};

struct TokenizeOptions {
  TokenizerPtr tokenizer;
  std::vector<CorpusFile> sources;
  std::string field = "text";   ///< key of the text in lines of JSON, or column of a Parquet file
  bool special_tokens = true;   ///< put the tokenizer's prefix and suffix around documents
  std::int32_t end_token = -1;  ///< put after each document; -1: none
  bool skip_bad = false;  ///< skip bad lines and rows, and the rest of damaged files; false: throw
  std::int64_t shard_tokens = 100'000'000;
  int threads = 1;
  int part = 1, parts = 1;  ///< from 1
  bool overwrite = false;
  /// Returns whether to continue. Called by one thread at a time.
  std::function<bool(const TokenizeProgress&)> progress = {};
  std::function<void(const std::string&)> warn = {};  ///< called by any thread
};

struct TokenizeReport {
  std::int64_t tokens = 0, documents = 0, skipped = 0;
  std::int64_t text_bytes = 0;     ///< tokenized by this process
  std::vector<TokenShard> shards;  ///< of the directory or part
  bool was_done = false;           ///< by an earlier process
};

/// Thrown if TokenizeOptions::progress returns false.
class TokenizeStopped : public Error {
 public:
  using Error::Error;
};

/// Writes the tokens of all sources to one file, which appears when it is whole. The bytes do not depend
/// on the number of threads, here and below. Memory: about 16 MiB per thread, and a small multiple of the
/// longest line or row and of the longest document that the tokenizer cannot cut.
/// @throws IoError, CorruptCheckpoint on sources; InvalidArgument of the tokenizer; Unsupported of either
TokenizeReport tokenize_to_file(const TokenizeOptions& options, const fs::path& out);

/// Writes the tokens of a part of the sources to shards in a directory, and, if there is one part, its
/// index. Continues after the last whole shard of an earlier process with the same command.
/// @throws as tokenize_to_file; InvalidArgument if the directory is of another command, or another process
///   writes the part
TokenizeReport tokenize_to_directory(const TokenizeOptions& options, const fs::path& dir);

}  // namespace tessera::io
