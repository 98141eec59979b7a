#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "io/base/json.h"

namespace tessera::io {

/// Hugging Face tokenizer.json that encodes and decodes like the tokenizer of a description in
/// tokenizer_tessera.json. Characters outside the vocabulary remain an error. Empty unless the
/// description is of type bytes or chars.
std::optional<Json> tokenizer_to_hf(const Json& description);

/// The files that a description of type "files" holds, by name; none for another type.
/// @param source  of the description, for errors
/// @throws CorruptCheckpoint
std::map<std::string, std::string> tokenizer_files(const Json& description,
                                                   const std::string& source);

/// tokenizer_config.json to go with tokenizer.json. Without it, AutoTokenizer looks for GPT-2's
/// vocabulary.
/// @param seq_len  tokens that the model can attend to
Json tokenizer_config_to_hf(std::int64_t seq_len);

}  // namespace tessera::io
