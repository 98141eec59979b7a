#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "io/data/tokenizer.h"
#include "io/tokenizer/added_tokens.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/decoder.h"
#include "io/tokenizer/files.h"
#include "io/tokenizer/normalizer.h"
#include "io/tokenizer/pre_tokenizer.h"

namespace tessera::io {

inline constexpr std::int32_t kMaxTokenId = (1 << 20) - 1;

/// Parts of a BPE tokenizer, in the order in which text passes them.
struct Pipeline {
  std::string kind = {};
  Normalizer normalizer = {};
  PreTokenizer pre_tokenizer = {};
  Bpe model;
  bool byte_level = false;          ///< of the model
  bool byte_level_decoder = false;  ///< pieces are bytes to be joined, and there is no decoder
  std::vector<AddedToken> added = {};
  /// Text of each id before the decoder changes it, by id.
  std::vector<std::string> pieces = {};
  Decoder decoder = Decoder();
  std::vector<std::int32_t> prefix = {}, suffix = {};
  std::int32_t bos_id = -1, eos_id = -1;
  TokenizerFiles files = {};
};

/// Malformed UTF-8 is kept by byte-level tokenizers, so that decode() gives it back, and is replaced
/// by U+FFFD by others.
TokenizerPtr make_pipeline_tokenizer(Pipeline parts);

/// Reads bos_token and eos_token of tokenizer_config.json, if it is among the files.
/// @param id_of  of a token's text, or -1
void read_special_ids(const TokenizerFiles& files,
                      const std::function<std::int32_t(const std::string&)>& id_of,
                      std::int32_t& bos_id, std::int32_t& eos_id);

/// The 256 characters with which GPT-2's vocabulary writes bytes, in UTF-8, by byte.
const std::vector<std::string>& byte_characters();
/// @return false if a character stands for no byte
bool bytes_of_characters(std::string_view text, std::string& bytes);

}  // namespace tessera::io
