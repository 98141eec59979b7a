#pragma once

#include <optional>
#include <string>
#include <vector>

#include "io/base/json.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/model/text_generation.h"

namespace tessera::tools {

struct GenerateOptions {
  std::string model;
  std::optional<std::string> prompt;  ///< "-": standard input
  Tokens prompt_tokens;
  std::string chat, messages, chat_template;
  bool interactive = false;
  std::int64_t max_new_tokens = 200;
  models::SamplingOptions sampling{.temperature = 0.8};
  std::vector<std::string> stop;
  std::int64_t samples = 1;
  std::int64_t seed = 1337;
  LoadOptions load;
  bool json = false;

  GenerationOptions generation() const {
    return {.count = max_new_tokens,
            .sampling = sampling,
            .key = RngKey::make(static_cast<std::uint64_t>(seed), RngPurpose::Sampling, 0)};
  }
};

/// Text of a sample for a terminal, as its tokens come. Token ids if there is no tokenizer.
class SampleText {
 public:
  SampleText(const io::Tokenizer* tokenizer, const std::vector<std::string>& stops);
  /// Adds text that stop strings do not cut.
  std::string add_prompt(std::span<const std::int32_t> tokens);
  std::string add(std::int32_t token);
  bool stopped() const { return cut_.stopped(); }
  /// The end of the text.
  std::string rest();

 private:
  std::string text_of_tokens(std::span<const std::int32_t> tokens);

  std::optional<TextStream> stream_;
  StopText cut_;
  std::string pending_;
  bool first_ = true;
};

/// {"messages": [...]} from the file of --messages, which may hold the list alone.
io::OrderedJson read_messages(const std::string& file);

/// Answers the lines of standard input until it ends.
int run_interactive(const GenerateOptions& options, LoadedModel& loaded);

}  // namespace tessera::tools
