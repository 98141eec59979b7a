#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/base/json.h"
#include "io/gguf/writer.h"

namespace tessera::io {

/// Types of tokens in `tokenizer.ggml.token_type`.
enum class GgufToken : std::int32_t { Normal = 1, Unknown, Control, UserDefined, Unused, Byte };

/// Pattern of a `tokenizer.ggml.pre`, and whether whole words that are tokens skip the merges; an
/// empty pattern if it is unknown.
std::pair<std::string_view, bool> gguf_split(std::string_view pre);

/// Adds the tokenizer of a Hugging Face model: keys `tokenizer.*`. Without one, or if readers of GGUF
/// would split text otherwise, the file says that it has none.
/// @param files     names and contents of tokenizer.json, tokenizer_config.json, ...
/// @param config    config.json; has vocab_size
/// @param warnings  receives the reason why the tokenizer is missing
/// @throws CorruptCheckpoint on malformed files
void add_gguf_vocabulary(GgufKeys& keys, const std::map<std::string, std::string>& files,
                         const Json& config, std::vector<std::string>& warnings);

}  // namespace tessera::io
