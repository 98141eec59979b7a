#include "tools/tessera/model/text_generation.h"

#include <algorithm>

#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace

std::vector<std::int32_t> generate(models::LanguageModel& model,
                                   const std::shared_ptr<Context>& context,
                                   const std::vector<std::int32_t>& prompt, std::int64_t count,
                                   const models::SamplingOptions& options, const RngKey& key,
                                   const std::function<void(std::int32_t)>& on_token,
                                   std::span<const std::int32_t> ends) {
  require(!prompt.empty(), "the prompt is empty; give at least one token to continue");
  options.validate();
  const auto positions = static_cast<std::size_t>(model.arch().seq_len);
  std::vector<std::int32_t> text = prompt;
  std::vector<std::int32_t> result;
  const std::vector<std::int64_t>& eos = model.arch().eos_tokens;
  nn::KvCache cache(std::min(model.arch().seq_len, std::ssize(prompt) + count));
  std::size_t fed = 0;  // tokens of `text` that were fed to the cache
  for (std::int64_t i = 0; i < count; ++i) {
    std::size_t fresh = text.size() - fed;
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
    const auto first = text.end() - static_cast<std::ptrdiff_t>(fresh);
    const std::vector<std::int32_t> next(first, text.end());
    const Tensor tokens = Tensor::from<std::int32_t>(context, {1, static_cast<std::int64_t>(fresh)},
                                                     std::span<const std::int32_t>(next));
    const Tensor drawn =
        models::sample(model.decode(tokens, cache), options, key, static_cast<std::uint64_t>(i));
    fed = text.size();
    const bool is_plan = context->device().type == DeviceType::Meta;
    const std::int32_t token = is_plan ? 0 : drawn.to_vector<std::int32_t>()[0];
    require(token >= 0, "no logit is finite: the model's weights are not usable");
    text.push_back(token);
    result.push_back(token);
    if (on_token) on_token(token);
    if (is_plan) continue;
    if (std::ranges::find(eos, token) != eos.end()) break;
    if (std::ranges::find(ends, token) != ends.end()) break;
  }
  return result;
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
  std::size_t kept = text.ends_with('\r') ? 1 : 0;
  for (std::size_t n = 1; n <= std::min<std::size_t>(3, text.size()); ++n) {
    if (character_length(std::string_view(text).substr(text.size() - n)) > n) kept = n;
  }
  std::string result = printable(std::string_view(text).substr(0, text.size() - kept));
  text.erase(0, text.size() - kept);
  return result;
}

}  // namespace tessera::tools
