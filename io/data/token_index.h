#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "io/base/file.h"
#include "io/base/json.h"
#include "io/data/corpus.h"

namespace tessera::io {

/// A token file of a directory.
struct TokenShard {
  std::string file;
  std::int64_t tokens = 0;
  std::int64_t documents = 0;  ///< that begin in it
  std::uint64_t crc64 = 0;     ///< of the file
};

/// Where tokenization goes on after the shards.
struct TokenPosition {
  CorpusPosition at;
  std::int64_t tokens = 0;   ///< of the unit at this position that the shards hold
  std::int64_t skipped = 0;  ///< documents and streams skipped before it
};

/// Description of a directory of token shards, or of one part of it. io/FORMAT.md defines the file.
struct TokenIndex {
  OrderedJson command;  ///< everything that determines the tokens: tokenizer, sources, options
  std::vector<TokenShard> shards;
  std::int64_t skipped = 0;
  std::optional<TokenPosition> next;  ///< of a part that is not complete

  std::int64_t tokens() const;
  std::int64_t documents() const;
  std::int64_t vocab_size() const;
  bool is_wide() const;
};

inline constexpr const char* kTokenIndexName = "index.json";
/// Tokenizer of the shards; load_tokenizer() reads it.
inline constexpr const char* kTokenizerName = "tokenizer_tessera.json";

/// @throws IoError; CorruptCheckpoint on a malformed or damaged file
TokenIndex read_token_index(const fs::path& path);
/// @throws IoError
void write_token_index(const fs::path& path, const TokenIndex& index);

/// Name of the index of part `part` of `parts`: "part-00001-of-00004.json".
std::string part_index_name(int part, int parts);
/// Indexes of parts in a directory, sorted. @throws IoError
std::vector<fs::path> part_indexes(const fs::path& dir);
/// Name of a part's shard; those of all parts sort in the order of their documents.
std::string token_shard_name(int part, int parts, std::size_t number);

/// First difference between two commands for messages; empty: none.
std::string command_difference(const OrderedJson& before, const OrderedJson& now);

/// Reads the index of a directory. @throws IoError, also if tokenization has not finished
TokenIndex read_token_directory(const fs::path& dir);

/// Joins the indexes of all parts and removes them. @throws IoError naming missing parts; InvalidArgument on
/// parts of different commands
TokenIndex commit_token_parts(const fs::path& dir);

}  // namespace tessera::io
