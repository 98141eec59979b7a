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

/// Continues a prompt token by token, with a cache of keys and values. Of a prompt that is longer
/// than the model's positions, as many tokens from its end as there are positions are read. When
/// the positions are used up, the last tokens of the text so far, half as many as positions (at
/// least one), become the new context.
/// @param on_token  called with each new token; may be empty
/// @return the new tokens
/// @throws InvalidArgument on an empty prompt or a token outside the vocabulary
std::vector<std::int32_t> generate(models::Gpt2& model, const std::shared_ptr<Context>& context,
                                   const std::vector<std::int32_t>& prompt, std::int64_t count,
                                   const models::SamplingOptions& options, const RngKey& key,
                                   const std::function<void(std::int32_t)>& on_token);

/// Text that is safe on a terminal: control characters but tab, newline and the carriage return in
/// front of one, and bytes that are no UTF-8, become the replacement character.
std::string printable(std::string_view text);

/// For text that arrives in pieces: takes all from its front that can be shown, and returns it as
/// printable() does. What stays, at most 3 bytes, is a character whose end is to come yet, or a
/// carriage return.
std::string take_printable(std::string& text);

}  // namespace tessera::tools
