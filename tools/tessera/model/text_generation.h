#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/data/tokenizer.h"
#include "models/language_model.h"
#include "models/sampling.h"

namespace tessera::tools {

using Tokens = std::vector<std::int32_t>;

struct GenerationOptions {
  std::int64_t count = 0;  ///< most new tokens of a row
  models::SamplingOptions sampling = {};
  RngKey key = {};
  std::uint64_t first_sample = 0;  ///< of row 0; each sample has random numbers of its own
  Tokens ends = {};                ///< more tokens that end a text
  /// Per row, the logits [1, V] after the prompt; undefined or missing: not known.
  std::vector<Tensor> first_logits = {};
  /// Called with each new token and the logits [1, V] that it was drawn from; false ends the row.
  std::function<bool(std::size_t row, std::int32_t token, const Tensor& logits)> on_token = {};
};

/// Generates tokens with a KV cache. Uses at most the last `positions` tokens of a prompt; when
/// all positions are used, continues with the last half of them as context. A row ends after a
/// token that ends a text.
/// @param prompts  of equal length, decoded together
/// @return the new tokens of each row
/// @throws InvalidArgument on an empty prompt or a token outside the vocabulary
std::vector<Tokens> generate(models::LanguageModel& model, const std::shared_ptr<Context>& context,
                             const std::vector<Tokens>& prompts, const GenerationOptions& options);

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

/// Cuts a text before the first of its stop strings, as it comes.
class StopText {
 public:
  /// @throws InvalidArgument on an empty string
  explicit StopText(std::vector<std::string> stops);
  /// Adds text, and returns what is before any stop string; text that may begin one is held back.
  std::string add(std::string_view text);
  /// The text that is held back, when no more follows.
  std::string rest() { return std::exchange(held_, {}); }
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

/// Makes text safe for a terminal: invalid UTF-8 and control characters (except tab, newline, and
/// CR before newline) become the replacement character.
std::string printable(std::string_view text);

/// For streaming: removes the complete characters of `text` and returns printable() of them. Leaves
/// at most 3 bytes: an incomplete character, or a CR.
std::string take_printable(std::string& text);
/// The same, but only invalid UTF-8 is replaced.
std::string take_characters(std::string& text);

}  // namespace tessera::tools
