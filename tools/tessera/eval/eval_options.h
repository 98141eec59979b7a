#pragma once

#include <string>
#include <vector>

#include "io/data/dataset.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/model/scoring.h"

namespace tessera::tools {

struct EvalOptions {
  std::string model;
  std::vector<std::string> data, documents, choices;
  std::string tokenizer, chat_template;
  std::string chat_date = io::kChatDate;
  std::int64_t batch = 8;
  std::int64_t seq_len = 0;
  std::int64_t max_rows = 0;
  LoadOptions load;
  bool json = false;
};

/// Tokens that come before a text of which the first token is scored: those that the tokenizer's
/// authors put there; else its beginning or end of text; else none.
Tokens scoring_prefix(const io::Tokenizer& tokenizer);

/// Perplexity of documents, each scored from its own start.
int run_documents(const EvalOptions& options, LoadedModel& loaded);
/// Accuracy on questions with several choices.
int run_choices(const EvalOptions& options, LoadedModel& loaded);

}  // namespace tessera::tools
