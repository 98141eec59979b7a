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

/// Continues a prompt token by token, with a cache of keys and values. When the model's positions
/// are used up, the last half of the text so far becomes the new context.
/// @param on_token  called with each new token; returning false ends the text. May be empty.
/// @return the new tokens
/// @throws InvalidArgument on an empty prompt or a token outside the vocabulary
std::vector<std::int32_t> generate(models::Gpt2& model, const std::shared_ptr<Context>& context,
                                   const std::vector<std::int32_t>& prompt, std::int64_t count,
                                   const models::SamplingOptions& options, const RngKey& key,
                                   const std::function<bool(std::int32_t)>& on_token);

/// Text that is safe on a terminal: control characters but newline and tab, and bytes that are no
/// UTF-8, become the replacement character.
std::string printable(std::string_view text);

}  // namespace tessera::tools
