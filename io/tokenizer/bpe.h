#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/tokenizer/word_cache.h"

namespace tessera::io {

/// Two neighbouring tokens and the token that replaces them.
struct Merge {
  std::int32_t left = 0, right = 0, result = 0;
  std::uint32_t rank = 0;
};

struct BpeOptions {
  /// Symbols are bytes, and tokens are given as bytes; otherwise both are UTF-8 text.
  bool byte_level = false;
  /// A word that is a token is not merged.
  bool ignore_merges = false;
  /// Characters without a token become their bytes' tokens <0x00> to <0xFF>.
  bool byte_fallback = false;
  bool fuse_unk = false;     ///< neighbouring unknown characters become one token
  std::int32_t unk_id = -1;  ///< of unknown characters; -1: they are dropped
};

/// Byte-pair encoding of words: repeatedly applies the merge of the lowest rank, the leftmost one
/// first. Immutable and thread-safe.
class Bpe {
 public:
  /// @param tokens  by id; an empty one is no token
  /// @param merges  of two of the same pair, the later one counts
  Bpe(std::vector<std::string> tokens, const std::vector<Merge>& merges, const BpeOptions& options);
  Bpe(Bpe&&) = default;
  Bpe& operator=(Bpe&&) = default;
  Bpe(const Bpe&) = delete;  // ids_ refers to tokens_
  Bpe& operator=(const Bpe&) = delete;

  /// Memory of an encoding thread, reused from word to word.
  struct Scratch {
    explicit Scratch(std::size_t text_bytes) : cache(text_bytes) {}
    WordCache cache;
    std::vector<std::int32_t> ids, next, previous;
    std::vector<std::uint32_t> ranks;
    std::vector<std::uint64_t> queue;
  };
  /// Appends the ids of a word.
  void encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const;

  const std::vector<std::string>& tokens() const { return tokens_; }
  /// Id of a token's text; -1 if there is none.
  std::int32_t find(std::string_view token) const;
  /// Whether no token holds `mark` after another character, so that words may be cut before it.
  bool cuts_before(std::string_view mark) const;

 private:
  struct Slot {
    std::uint64_t pair = ~std::uint64_t{0};
    std::uint32_t rank = 0;
    std::int32_t result = 0;
  };
  const Slot* find_merge(std::int32_t left, std::int32_t right) const;
  std::uint32_t rank_of(std::int32_t left, std::int32_t right) const;
  void split(std::string_view word, std::vector<std::int32_t>& ids) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;

  std::vector<std::string> tokens_;
  BpeOptions options_;
  std::unordered_map<std::string_view, std::int32_t> ids_;
  std::vector<Slot> merges_;  // open addressing
  int shift_ = 0;
  std::array<std::int32_t, 256> byte_ids_{};  // -1: none
  std::vector<std::int32_t> character_ids_;   // below U+10000
  std::unordered_map<char32_t, std::int32_t> rare_ids_;
};

}  // namespace tessera::io
