#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/gpt2.h"
#include "models/sampling.h"

namespace tessera::tools {

/// Continues a prompt token by token, with a key/value cache. Reads at most the last `positions`
/// tokens of the prompt. When the positions are used up, the last half of them becomes the new
/// context.
/// @param on_token  called with each new token; may be empty
/// @return the new tokens
/// @throws InvalidArgument on an empty prompt or a token outside the vocabulary
std::vector<std::int32_t> generate(models::Gpt2& model, const std::shared_ptr<Context>& context,
                                   const std::vector<std::int32_t>& prompt, std::int64_t count,
                                   const models::SamplingOptions& options, const RngKey& key,
                                   const std::function<void(std::int32_t)>& on_token);

/// Text that is safe on a terminal: bytes that are not UTF-8, and control characters except tab,
/// newline and CR before a newline, become the replacement character.
std::string printable(std::string_view text);

/// For text that arrives in pieces: removes the part that is complete and returns it as
/// printable(). Leaves at most 3 bytes: an unfinished character, or a CR.
std::string take_printable(std::string& text);

}  // namespace tessera::tools
