#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/data/tokenizer.h"
#include "models/language_model.h"
#include "models/sampling.h"

namespace tessera::tools {

/// Generates tokens with a KV cache. Uses at most the last `positions` tokens of the prompt; when
/// all positions are used, continues with the last half of them as context. Ends after a token that
/// ends a text.
/// @param on_token  called with each new token; may be empty
/// @param ends      more tokens that end the text
/// @return the new tokens
/// @throws InvalidArgument on an empty prompt or a token outside the vocabulary
std::vector<std::int32_t> generate(models::LanguageModel& model,
                                   const std::shared_ptr<Context>& context,
                                   const std::vector<std::int32_t>& prompt, std::int64_t count,
                                   const models::SamplingOptions& options, const RngKey& key,
                                   const std::function<void(std::int32_t)>& on_token,
                                   std::span<const std::int32_t> ends = {});

/// The text of generated tokens. A vocabulary may be larger than the tokenizer's: ids that the
/// tokenizer lacks become the replacement character.
std::string text_of(const io::Tokenizer& tokenizer, std::span<const std::int32_t> ids);

/// The text of a sequence of ids, as they come. The text of a token may depend on the one before it:
/// SentencePiece's first one loses its space.
class TextStream {
 public:
  explicit TextStream(const io::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  /// The text that these ids add.
  std::string next(std::span<const std::int32_t> ids);

 private:
  const io::Tokenizer& tokenizer_;
  std::vector<std::int32_t> last_;
};

/// Makes text safe for a terminal: invalid UTF-8 and control characters (except tab, newline, and
/// CR before newline) become the replacement character.
std::string printable(std::string_view text);

/// For streaming: removes the complete characters of `text` and returns printable() of them. Leaves
/// at most 3 bytes: an incomplete character, or a CR.
std::string take_printable(std::string& text);

}  // namespace tessera::tools
