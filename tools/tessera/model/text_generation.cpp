#include "tools/tessera/model/text_generation.h"

#include <algorithm>

namespace tessera::tools {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// Bytes of the UTF-8 character that text starts with, more than text.size() if its end is missing;
// 0 if no character starts so.
std::size_t character_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xF5   ? 0
                             : first >= 0xF0 ? 4
                             : first >= 0xE0 ? 3
                             : first >= 0xC2 ? 2
                                             : 0;
  for (std::size_t i = 1; i < std::min(length, text.size()); ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  if (text.size() == 1) return length;
  // Overlong forms, surrogates, and what lies above U+10FFFF.
  if ((first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
      (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F)) {
    return 0;
  }
  return length;
}

}  // namespace

std::vector<std::int32_t> generate(models::Gpt2& model, const std::shared_ptr<Context>& context,
                                   const std::vector<std::int32_t>& prompt, std::int64_t count,
                                   const models::SamplingOptions& options, const RngKey& key,
                                   const std::function<void(std::int32_t)>& on_token) {
  require(!prompt.empty(), "the prompt is empty; give at least one token to go on from");
  options.validate();
  const auto positions = static_cast<std::size_t>(model.config().seq_len);
  std::vector<std::int32_t> text = prompt;
  std::vector<std::int32_t> result;
  models::KvCache cache = model.make_cache(1);
  std::size_t fed = 0;  // tokens of `text` that the cache has seen, counted from its start
  for (std::int64_t i = 0; i < count; ++i) {
    std::size_t fresh = text.size() - fed;
    if (static_cast<std::size_t>(cache.past) + fresh > positions) {
      // What a prompt says last matters most; on later slides, half of the positions are left free
      // so that not every token costs a whole context.
      cache.past = 0;
      fresh = i == 0 ? positions : std::max<std::size_t>(positions / 2, 1);
    }
    const auto first = text.end() - static_cast<std::ptrdiff_t>(fresh);
    const std::vector<std::int32_t> next(first, text.end());
    const Tensor tokens = Tensor::from<std::int32_t>(context, {1, static_cast<std::int64_t>(fresh)},
                                                     std::span<const std::int32_t>(next));
    const Tensor drawn =
        models::sample(model.decode(tokens, cache), options, key, static_cast<std::uint64_t>(i));
    fed = text.size();
    const std::int32_t token = drawn.to_vector<std::int32_t>()[0];
    require(token >= 0, "no logit is finite: the model's weights are not usable");
    text.push_back(token);
    result.push_back(token);
    if (on_token) on_token(token);
  }
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
  std::size_t kept = text.ends_with('\r') ? 1 : 0;
  for (std::size_t n = 1; n <= std::min<std::size_t>(3, text.size()); ++n) {
    if (character_length(std::string_view(text).substr(text.size() - n)) > n) kept = n;
  }
  std::string result = printable(std::string_view(text).substr(0, text.size() - kept));
  text.erase(0, text.size() - kept);
  return result;
}

}  // namespace tessera::tools
