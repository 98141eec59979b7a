#pragma once

#include <map>
#include <string>
#include <string_view>

#include "io/base/json.h"
#include "io/data/tokenizer.h"

namespace tessera::io {

/// The files that define a tokenizer, under the names that other programs expect: tokenizer.json;
/// vocab.json and merges.txt; tokenizer.model; tiktoken.model; tekken.json; and files that go with
/// them, such as tokenizer_config.json.
struct TokenizerFiles {
  std::map<std::string, std::string, std::less<>> content = {};
  /// Where a file was read from, for errors; its name if unknown.
  std::map<std::string, std::string, std::less<>> paths = {};
  /// Pattern of a tiktoken file, or its name; empty: the one that fits the number of ranks.
  std::string pattern = {};

  bool has(std::string_view name) const { return content.contains(name); }
  std::string path(const std::string& name) const {
    const auto found = paths.find(name);
    return found == paths.end() ? name : found->second;
  }
};

/// Reads a tokenizer's file, with those next to it that belong to it, or a directory's.
/// @throws IoError; InvalidArgument if there is no tokenizer
TokenizerFiles read_tokenizer_files(const std::string& path);

/// @throws InvalidArgument on malformed files, Unsupported on what this build lacks; both name file and field
TokenizerPtr make_tokenizer(TokenizerFiles files);

/// {"type":"files","files":{name:text},"binary":{name:base64},"pattern":...}
std::string tokenizer_files_to_json(const TokenizerFiles& files);

/// Inverse of tokenizer_files_to_json(). @throws CorruptCheckpoint
TokenizerFiles tokenizer_files_from_json(const Json& json, const std::string& source);

// One for each kind of tokenizer.
TokenizerPtr make_hugging_face_tokenizer(TokenizerFiles files);
TokenizerPtr make_vocab_merges_tokenizer(TokenizerFiles files);
TokenizerPtr make_sentencepiece_tokenizer(TokenizerFiles files);
TokenizerPtr make_tiktoken_tokenizer(TokenizerFiles files);
TokenizerPtr make_tekken_tokenizer(TokenizerFiles files);

inline constexpr const char* kTokenizerJson = "tokenizer.json";
inline constexpr const char* kTokenizerConfigJson = "tokenizer_config.json";
inline constexpr const char* kSpecialTokensMapJson = "special_tokens_map.json";
inline constexpr const char* kChatTemplateJinja = "chat_template.jinja";
inline constexpr const char* kVocabJson = "vocab.json";
inline constexpr const char* kMergesTxt = "merges.txt";
inline constexpr const char* kSentencePieceModel = "tokenizer.model";
inline constexpr const char* kTiktokenModel = "tiktoken.model";
inline constexpr const char* kTekkenJson = "tekken.json";

}  // namespace tessera::io
