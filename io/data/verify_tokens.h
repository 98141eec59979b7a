#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/base/file.h"

namespace tessera::io {

struct TokenProblem {
  std::string file, what;
};

struct VerifyTokensReport {
  std::int64_t shards = 0, tokens = 0, bytes = 0;
  std::int64_t without_checksum = 0;  ///< files that no index describes
  std::vector<TokenProblem> problems;
};

struct VerifyTokensOptions {
  int threads = 1;
  /// Bytes done and in total. Called by one thread at a time.
  std::function<void(std::int64_t, std::int64_t)> progress = {};
};

/// Reads a directory of token shards, or a token file: headers and sizes, ids against the vocabulary, and
/// checksums. Memory: 1 MiB per thread.
/// @throws IoError, CorruptCheckpoint on a directory whose index is missing or damaged
VerifyTokensReport verify_tokens(const fs::path& path, const VerifyTokensOptions& options);

}  // namespace tessera::io
