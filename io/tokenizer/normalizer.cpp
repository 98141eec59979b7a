#include "io/tokenizer/normalizer.h"

namespace tessera::io {
namespace {

struct ApplyNormalizer {
  std::string text;

  void operator()(NormalForm form) { text = normalize_unicode(text, form); }
  void operator()(Lowercase) { text = lowercase_unicode(text); }
  void operator()(StripAccents) {
    std::string kept;
    for (std::size_t i = 0; i < text.size(); i += utf8_length(text[i]))
      if (!is_mark(code_point_at(text, i))) kept.append(text, i, utf8_length(text[i]));
    text = std::move(kept);
  }
  void operator()(const Prepend& step) {
    if (!text.empty()) text.insert(0, step.text);
  }
  void operator()(const StripSpace& step) {
    std::size_t begin = 0, end = 0;
    std::size_t i = 0;
    for (; i < text.size(); i += utf8_length(text[i])) {
      if (is_white_space(code_point_at(text, i))) continue;
      if (end == 0) begin = i;
      end = i + utf8_length(text[i]);
    }
    if (end == 0) begin = step.left || step.right ? text.size() : 0;  // nothing but space
    if (!step.left && end > 0) begin = 0;
    if (!step.right) end = text.size();
    text = begin < end ? text.substr(begin, end - begin) : std::string();
  }
  void operator()(const Replace& step) { text = replace_all(text, step); }
};

}  // namespace

std::string replace_all(std::string_view text, const Replace& replace) {
  std::string out;
  std::size_t copied = 0;
  const auto put = [&](std::size_t begin, std::size_t end) {
    out.append(text, copied, begin - copied);
    out += replace.by;
    copied = end;
  };
  if (replace.pattern) {
    RegexMatches matches(*replace.pattern);
    matches.start(text);
    for (std::size_t begin = 0, end = 0; matches.next(begin, end);) put(begin, end);
  } else if (!replace.text.empty()) {
    for (std::size_t i = text.find(replace.text); i != text.npos;
         i = text.find(replace.text, copied))
      put(i, i + replace.text.size());
  }
  out.append(text, copied, text.size() - copied);
  return out;
}

std::string Normalizer::apply(std::string_view text) const {
  ApplyNormalizer apply{std::string(text)};
  for (const NormalizerStep& step : steps_) std::visit(apply, step);
  return std::move(apply.text);
}

bool Normalizer::is_local() const {
  for (const NormalizerStep& step : steps_) {
    if (!std::holds_alternative<NormalForm>(step) && !std::holds_alternative<Lowercase>(step) &&
        !std::holds_alternative<StripAccents>(step))
      return false;
  }
  return true;
}

}  // namespace tessera::io
