#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/base/json.h"
#include "io/gguf/writer.h"

namespace tessera::io {

/// Types of tokens in `tokenizer.ggml.token_type`.
enum class GgufToken : std::int32_t { Normal = 1, Unknown, Control, UserDefined, Unused, Byte };

/// Adds the tokenizer of a Hugging Face model: keys `tokenizer.*`. Without one, or if readers of GGUF
/// would split text otherwise, the file says that it has none.
/// @param files     names and contents of tokenizer.json, tokenizer_config.json, ...
/// @param config    config.json; has vocab_size
/// @param warnings  receives the reason why the tokenizer is missing
/// @throws CorruptCheckpoint on malformed files
void add_gguf_vocabulary(GgufKeys& keys, const std::map<std::string, std::string>& files,
                         const Json& config, std::vector<std::string>& warnings);

}  // namespace tessera::io
