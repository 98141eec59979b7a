#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/tokenizer/pipeline.h"

namespace tessera::io {

/// Tokens of a vocabulary whose ranks are its merges: neighbouring tokens merge if their bytes together
/// are a token, the lowest rank first; a word that is a token is not merged.
class Ranks {
 public:
  /// @param offset  of ids from ranks
  explicit Ranks(std::int32_t offset = 0) : offset_(static_cast<std::size_t>(offset)) {}
  /// @param where  of the token, called for errors
  /// @throws CorruptCheckpoint on a repeated or negative rank, or an empty token
  void add(std::string bytes, std::int64_t rank, const std::function<std::string()>& where);
  std::size_t size() const { return size_; }
  /// Model, pre-tokenizer and pieces.
  /// @throws CorruptCheckpoint on repeated tokens, or a byte without one
  Pipeline finish(const std::string& pattern, const std::string& path);

 private:
  std::vector<Merge> find_merges() const;
  std::size_t offset_;
  std::size_t size_ = 0;
  std::vector<std::string> tokens_;  // by id
  std::unordered_map<std::string_view, std::int32_t> ids_;
};

}  // namespace tessera::io
