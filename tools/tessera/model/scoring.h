#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "tools/tessera/model/text_generation.h"

namespace tessera::tools {

/// A text of which the tokens from `first` on are scored, each given those before it.
struct ScoredText {
  Tokens tokens;
  std::size_t first = 1;  ///< at least 1
};

struct TokenScore {
  double log_prob = 0;
  std::vector<std::pair<std::int32_t, double>> top;  ///< most likely tokens, in descending order
};

struct ScoreOptions {
  std::int64_t batch = 8;  ///< texts at a time
  std::int64_t top = 0;    ///< most likely tokens per position
  /// Called with the logits [1, V] after the last token of each text; may be empty.
  std::function<void(std::size_t text, const Tensor& logits)> on_next = {};
  std::function<bool()> keep_going = {};  ///< called before each batch; false ends with no result
};

/// Scores texts in batches of similar lengths. Texts without a scored token have no scores.
/// @return per text, the scores of tokens first, first + 1, ...
/// @throws InvalidArgument on a text of more than seq_len + 1 tokens (seq_len with on_next), or a
///   token outside the vocabulary
std::vector<std::vector<TokenScore>> score(models::LanguageModel& model,
                                           const std::shared_ptr<Context>& context,
                                           const std::vector<ScoredText>& texts,
                                           const ScoreOptions& options);

/// Scores tokens[i] by row i of logits [N, V]; -1: ignored.
std::vector<TokenScore> score_rows(const Tensor& logits, const Tokens& tokens, std::int64_t top);

/// Sum of the scores' log-probabilities.
double log_likelihood(const std::vector<TokenScore>& scores);

}  // namespace tessera::tools
