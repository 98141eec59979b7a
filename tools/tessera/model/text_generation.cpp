#include "tools/tessera/model/text_generation.h"

#include <algorithm>

#include "io/tokenizer/unicode.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

bool contains(std::span<const std::int32_t> tokens, std::int32_t token) {
  return std::ranges::find(tokens, token) != tokens.end();
}

// Removes all but an incomplete character, and at least `kept` bytes, from the end of a text.
std::string take_complete(std::string& text, std::size_t kept) {
  for (std::size_t n = 1; n <= std::min<std::size_t>(3, text.size()); ++n) {
    if (character_length(std::string_view(text).substr(text.size() - n)) > n) kept = n;
  }
  std::string result = text.substr(0, text.size() - kept);
  text.erase(0, text.size() - kept);
  return result;
}

}  // namespace

std::vector<Tokens> generate(models::LanguageModel& model, const std::shared_ptr<Context>& context,
                             const std::vector<Tokens>& prompts, const GenerationOptions& options) {
  require(!prompts.empty() && !prompts[0].empty(),
          "the prompt is empty; give at least one token to continue");
  for (const Tokens& prompt : prompts)
    require(prompt.size() == prompts[0].size(),
            "prompts decoded together must have equal lengths, got {} and {} tokens",
            prompts[0].size(), prompt.size());
  const models::SamplingOptions& sampling = options.sampling;
  sampling.validate();
  const auto positions = static_cast<std::size_t>(model.arch().seq_len);
  const std::int64_t vocab_size = model.arch().vocab_size;
  const Tokens eos(model.arch().eos_tokens.begin(), model.arch().eos_tokens.end());
  const std::int64_t rows = std::ssize(prompts);
  std::vector<Tokens> texts = prompts;
  std::vector<Tokens> results(prompts.size());
  std::vector<bool> ended(prompts.size());
  nn::KvCache cache(std::min(model.arch().seq_len, std::ssize(prompts[0]) + options.count));
  std::size_t fed = 0;  // tokens of each text that were fed to the cache
  const bool knows_first =
      options.first_logits.size() == prompts.size() &&
      std::ranges::all_of(options.first_logits, [](const Tensor& t) { return t.defined(); });
  for (std::int64_t i = 0; i < options.count; ++i) {
    const bool known = i == 0 && knows_first;
    const std::size_t length = texts[0].size();
    std::size_t fresh = length - fed;
    if (static_cast<std::size_t>(cache.past) + fresh > positions) {
      // A long prompt keeps its last `positions` tokens. Later, half of the positions are freed at
      // once, so that the context is rarely recomputed.
      cache.past = 0;
      fresh = i == 0 ? positions : std::max<std::size_t>(positions / 2, 1);
    }
    if (model.outgrows(cache.past, static_cast<std::int64_t>(fresh))) {
      fresh += static_cast<std::size_t>(cache.past);
      cache.past = 0;
    }
    Tensor logits;
    if (!known) {
      Tokens next;
      for (const Tokens& text : texts)
        next.insert(next.end(), text.end() - static_cast<std::ptrdiff_t>(fresh), text.end());
      const Shape shape{rows, static_cast<std::int64_t>(fresh)};
      logits = model.decode(
          Tensor::from<std::int32_t>(context, shape, std::span<const std::int32_t>(next)), cache);
      fed = length;
    }
    for (std::size_t row = 0; row < texts.size(); ++row) {
      Tokens& text = texts[row];
      if (ended[row]) {
        text.push_back(text.back());
        continue;
      }
      const Tensor own = known ? options.first_logits[row]
                               : logits.alias({1, vocab_size}, {vocab_size, 1},
                                              static_cast<std::int64_t>(row) * vocab_size);
      const Tensor drawn =
          models::sample(sampling.repetition_penalty == 1.0
                             ? own
                             : models::penalize_repetition(own, text, sampling.repetition_penalty),
                         sampling, options.key,
                         ((options.first_sample + row) << 32) + static_cast<std::uint64_t>(i));
      const bool is_plan = context->device().type == DeviceType::Meta;
      const std::int32_t token = is_plan ? 0 : drawn.to_vector<std::int32_t>()[0];
      require(token >= 0, "no logit is finite: the model's weights are not usable");
      text.push_back(token);
      results[row].push_back(token);
      const bool goes_on = !options.on_token || options.on_token(row, token, own);
      ended[row] = !is_plan && (!goes_on || contains(eos, token) || contains(options.ends, token));
    }
    if (std::ranges::find(ended, false) == ended.end()) break;
  }
  return results;
}

std::string text_of(const io::Tokenizer& tokenizer, std::span<const std::int32_t> ids) {
  std::string text;
  while (!ids.empty()) {
    const auto known = static_cast<std::size_t>(
        std::find_if(ids.begin(), ids.end(),
                     [&](std::int32_t id) { return id >= tokenizer.vocab_size(); }) -
        ids.begin());
    text += tokenizer.decode(ids.first(known));
    if (known < ids.size()) text += kReplacement;
    ids = ids.subspan(std::min(known + 1, ids.size()));
  }
  return text;
}

std::string TextStream::next(std::span<const std::int32_t> ids) {
  constexpr std::size_t kContext = 4;
  const std::string before = text_of(tokenizer_, last_);
  last_.insert(last_.end(), ids.begin(), ids.end());
  std::string text = text_of(tokenizer_, last_);
  if (last_.size() > kContext) last_.erase(last_.begin(), last_.end() - kContext);
  return text.starts_with(before) ? text.substr(before.size()) : text_of(tokenizer_, ids);
}

StopText::StopText(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) require(!stop.empty(), "a stop string is empty");
}

std::string StopText::add(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  std::size_t end = held_.npos;
  for (const std::string& stop : stops_) end = std::min(end, held_.find(stop));
  stopped_ = end != held_.npos;
  std::size_t held = 0;  // bytes that may begin a stop string
  for (const std::string& stop : stops_)
    for (std::size_t n = std::min(held_.size(), stop.size() - 1); n > held; --n)
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n))
        held = n;
  std::string result = held_.substr(0, stopped_ ? end : held_.size() - held);
  held_ = stopped_ ? std::string() : held_.substr(held_.size() - held);
  return result;
}

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t length = character_length(text);
    const auto first = static_cast<unsigned char>(text[0]);
    const bool newline = text.starts_with('\n') || text.starts_with("\r\n");
    const bool control =
        length == 1 && (first == 0x7F || (first < 0x20 && first != '\t' && !newline));
    if (length == 0 || length > text.size() || control) {
      result += kReplacement;
      text.remove_prefix(1);
    } else {
      result += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return result;
}

std::string take_printable(std::string& text) {
  return printable(take_complete(text, text.ends_with('\r') ? 1 : 0));
}

std::string take_characters(std::string& text) {
  return io::replace_malformed_utf8(take_complete(text, 0));
}

}  // namespace tessera::tools
