#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numbers>

#include "core/base/clock.h"
#include "io/base/file.h"
#include "io/base/json.h"
#include "io/chat/conversation_reader.h"
#include "io/tokenizer/unicode.h"
#include "tools/tessera/eval/eval_options.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kLongestDocument = std::int64_t{1} << 30;  // bytes
constexpr std::int64_t kBatchesAtOnce = 16;                       // sorted by length

/// Sums over documents.
struct Totals {
  std::int64_t documents = 0, tokens = 0, words = 0, bytes = 0;
  double log_likelihood = 0;
};

// As lm-evaluation-harness counts: len(re.split(r"\s+", text)).
std::int64_t count_words(std::string_view text) {
  std::int64_t words = 1;
  bool in_space = false;
  for (std::size_t i = 0; i < text.size(); i += io::utf8_length(text[i])) {
    const bool space = io::is_white_space(io::code_point_at(text, i));
    if (space && !in_space) ++words;
    in_space = space;
  }
  return words;
}

// Windows of a document that together score each token once, each after at least one token, and as
// lm-evaluation-harness cuts them: the last one has as much context as fits.
std::vector<ScoredText> windows_of(const Tokens& tokens, std::size_t prefix,
                                   std::size_t positions) {
  std::vector<ScoredText> windows;
  for (std::size_t begin = std::max<std::size_t>(prefix, 1); begin < tokens.size();) {
    const std::size_t end =
        std::min(tokens.size(), windows.empty() ? positions + 1 : begin + positions);
    const std::size_t first = end > positions + 1 ? end - positions - 1 : 0;
    windows.push_back({Tokens(tokens.begin() + static_cast<std::ptrdiff_t>(first),
                              tokens.begin() + static_cast<std::ptrdiff_t>(end)),
                       begin - first});
    begin = end;
  }
  return windows;
}

void for_each_document(const EvalOptions& options,
                       const std::function<bool(const std::string&, const std::string&)>& use) {
  for (const std::string& file : io::expand_globs(options.documents)) {
    bool goes_on = true;
    if (io::is_conversation_file(file))
      io::for_each_line(file, [&](std::string_view line, const std::string& where) {
        const io::Json json = io::parse_json(line, where);
        return goes_on = use(io::JsonReader(json, where).at("text").string(), where);
      });
    else
      goes_on = use(io::read_file(file, kLongestDocument), file);
    if (!goes_on) return;
  }
}

}  // namespace

Tokens scoring_prefix(const io::Tokenizer& tokenizer) {
  if (Tokens prefix = tokenizer.prefix(); !prefix.empty()) return prefix;
  if (tokenizer.bos_id() >= 0) return {tokenizer.bos_id()};
  if (tokenizer.eos_id() >= 0) return {tokenizer.eos_id()};
  return {};
}

int run_documents(const EvalOptions& options, LoadedModel& loaded) {
  const io::Tokenizer& tokenizer = *loaded.tokenizer;
  const Tokens prefix = scoring_prefix(tokenizer);
  const auto positions = static_cast<std::size_t>(options.seq_len);
  const auto start = std::chrono::steady_clock::now();
  Totals totals;
  std::vector<ScoredText> windows;
  const auto flush = [&] {
    for (const auto& scores :
         score(*loaded.model, loaded.context, windows, {.batch = options.batch})) {
      totals.tokens += std::ssize(scores);
      totals.log_likelihood += log_likelihood(scores);
    }
    windows.clear();
  };
  for_each_document(options, [&](const std::string& text, const std::string& where) {
    Tokens tokens = prefix;
    const Tokens own = tokenizer.encode(text, where);
    tokens.insert(tokens.end(), own.begin(), own.end());
    ++totals.documents;
    totals.words += count_words(io::replace_malformed_utf8(text));
    totals.bytes += std::ssize(text);
    for (ScoredText& window : windows_of(tokens, prefix.size(), positions)) {
      windows.push_back(std::move(window));
      if (std::ssize(windows) == kBatchesAtOnce * options.batch) flush();
    }
    return options.max_rows == 0 || totals.documents < options.max_rows;
  });
  flush();
  require<IoError>(totals.tokens > 0, "the documents have no token to score");
  const double seconds = seconds_since(start);
  const auto per = [&](std::int64_t count) {
    return -totals.log_likelihood / static_cast<double>(count);
  };
  const double speed = static_cast<double>(totals.tokens) / seconds;
  const nlohmann::ordered_json out = {{"model", loaded.path.string()},
                                      {"device", loaded.context->device().str()},
                                      {"loss", per(totals.tokens)},
                                      {"perplexity", std::exp(per(totals.tokens))},
                                      {"word_perplexity", std::exp(per(totals.words))},
                                      {"byte_perplexity", std::exp(per(totals.bytes))},
                                      {"bits_per_byte", per(totals.bytes) / std::numbers::ln2},
                                      {"documents", totals.documents},
                                      {"tokens", totals.tokens},
                                      {"words", totals.words},
                                      {"bytes", totals.bytes},
                                      {"seq_len", options.seq_len},
                                      {"tokens_per_s", speed}};
  if (options.json) {
    std::cout << out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
              << std::endl;
    return 0;
  }
  std::cout << format_rows(
      detect_console(STDOUT_FILENO),
      {{"model", loaded.path.string()},
       {"device", loaded.context->device().str()},
       {"loss", fmt::format("{:.4f} nats per token", per(totals.tokens))},
       {"perplexity", fmt::format("{:.3f} per token, {:.3f} per word, {:.4f} per byte",
                                  std::exp(per(totals.tokens)), std::exp(per(totals.words)),
                                  std::exp(per(totals.bytes)))},
       {"bits", fmt::format("{:.4f} per byte", per(totals.bytes) / std::numbers::ln2)},
       {"documents", fmt::format("{} of {} tokens, {} words, {} bytes", totals.documents,
                                 totals.tokens, totals.words, totals.bytes)},
       {"speed", fmt::format("{} tokens/s", format_count(speed))}});
  return 0;
}

}  // namespace tessera::tools
