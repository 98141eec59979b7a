#pragma once

#include <cstdint>
#include <optional>

#include "io/base/json.h"

namespace tessera::io {

/// tokenizer.json of Hugging Face's `tokenizers` for a description as in tokenizer_tessera.json:
/// the same ids for every text, and the same text back. Characters outside a vocabulary of
/// characters are an error there too. Empty for a description other than of bytes or chars.
std::optional<Json> tokenizer_to_hf(const Json& description);

/// tokenizer_config.json beside it: without it, AutoTokenizer looks for GPT-2's own vocabulary.
/// @param seq_len  tokens that the model can attend to
Json tokenizer_config_to_hf(std::int64_t seq_len);

}  // namespace tessera::io
