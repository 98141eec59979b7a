#include "io/tokenizer/pre_tokenizer.h"

#include <utility>

#include "io/tokenizer/unicode.h"

namespace tessera::io {

PreTokenizer::PreTokenizer(std::vector<PreTokenizerStep> steps) : steps_(std::move(steps)) {}

bool PreTokenizer::can_cut() const {
  // A boundary of the last step may lie within a match of an earlier one, unless that is a character.
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const auto* split = std::get_if<Split>(&steps_[i]);
    if (split == nullptr ||
        (split->behavior != SplitBehavior::Isolated && split->behavior != SplitBehavior::Removed))
      return false;
    const auto* regex = std::get_if<std::shared_ptr<const Regex>>(&split->delimiter);
    const bool last = i + 1 == steps_.size();
    if (last) return regex != nullptr && !(*regex)->looks_behind() && cut_before_.empty();
    if (!std::holds_alternative<bool (*)(char32_t)>(split->delimiter)) return false;
  }
  return false;
}

PreTokenizer::Run::Run(const PreTokenizer& steps, std::function<void(std::string_view)> on_word)
    : steps_(steps), on_word_(std::move(on_word)) {
  for (const PreTokenizerStep& step : steps.steps_) {
    const auto* split = std::get_if<Split>(&step);
    const auto* regex =
        split == nullptr ? nullptr : std::get_if<std::shared_ptr<const Regex>>(&split->delimiter);
    matches_.push_back(regex == nullptr ? nullptr : std::make_unique<RegexMatches>(**regex));
  }
}

void PreTokenizer::Run::split(std::string_view text, std::string_view masked, bool first) {
  if (!text.empty()) apply(0, {text, masked, first});
}

void PreTokenizer::Run::apply(std::size_t step, const Piece& piece) {
  if (step == steps_.steps_.size()) return put_word(piece.text);
  std::visit([&](const auto& kind) { apply(kind, step, piece); }, steps_.steps_[step]);
}

void PreTokenizer::Run::put_word(std::string_view text) {
  const std::string_view mark = steps_.cut_before_;
  if (mark.empty()) return on_word_(text);
  std::size_t begin = 0;
  for (std::size_t i = text.find(mark); i != text.npos; i = text.find(mark, i)) {
    if (i > begin) on_word_(text.substr(begin, i - begin));
    begin = i;
    while (text.substr(i).starts_with(mark)) i += mark.size();
  }
  if (begin < text.size()) on_word_(text.substr(begin));
}

/// Calls on_range(begin, end, is_delimiter) for consecutive ranges that cover the piece.
template <typename OnRange>
void PreTokenizer::Run::find_delimiters(const Split& split, std::size_t step, const Piece& piece,
                                        const OnRange& on_range) {
  std::size_t done = 0;
  const auto put = [&](std::size_t begin, std::size_t end) {
    if (done < begin) on_range(done, begin, split.invert);
    on_range(begin, end, !split.invert);
    done = end;
  };
  if (matches_[step]) {
    matches_[step]->start(piece.masked);
    for (std::size_t begin = 0, end = 0; matches_[step]->next(begin, end);) put(begin, end);
  } else if (const auto* text = std::get_if<std::string>(&split.delimiter)) {
    for (std::size_t i = piece.text.find(*text); i != piece.text.npos && !text->empty();
         i = piece.text.find(*text, done))
      put(i, i + text->size());
  } else {
    const auto is_delimiter = std::get<bool (*)(char32_t)>(split.delimiter);
    for (std::size_t i = 0; i < piece.masked.size();) {
      const std::size_t length = utf8_length(piece.masked[i]);
      if (is_delimiter(code_point_at(piece.masked, i))) put(i, i + length);
      i += length;
    }
  }
  if (done < piece.text.size()) on_range(done, piece.text.size(), split.invert);
}

void PreTokenizer::Run::apply(const Split& split, std::size_t step, const Piece& piece) {
  const auto pass_on = [&](std::size_t begin, std::size_t end) {
    if (begin == end) return;
    apply(step + 1, {piece.text.substr(begin, end - begin), piece.masked.substr(begin, end - begin),
                     piece.first && begin == 0});
  };
  if (split.behavior == SplitBehavior::Isolated || split.behavior == SplitBehavior::Removed) {
    const bool removed = split.behavior == SplitBehavior::Removed;
    return find_delimiters(split, step, piece,
                           [&](std::size_t begin, std::size_t end, bool is_delimiter) {
                             if (!removed || !is_delimiter) pass_on(begin, end);
                           });
  }
  // A range is passed on once the next one turns out not to join it.
  bool held = false, was_delimiter = false;
  std::size_t held_begin = 0, held_end = 0;
  find_delimiters(split, step, piece, [&](std::size_t begin, std::size_t end, bool is_delimiter) {
    const bool joins =
        held &&
        (split.behavior == SplitBehavior::MergedWithPrevious ? is_delimiter && !was_delimiter
         : split.behavior == SplitBehavior::MergedWithNext   ? was_delimiter && !is_delimiter
                                                             : was_delimiter == is_delimiter);
    if (held && !joins) pass_on(held_begin, held_end);
    if (!joins) held_begin = begin;
    held_end = end;
    held = true;
    was_delimiter = is_delimiter;
  });
  if (held) pass_on(held_begin, held_end);
}

void PreTokenizer::Run::apply(const Metaspace& metaspace, std::size_t step, const Piece& piece) {
  const auto marked = [&](std::string_view text) {
    std::string out;
    out.reserve(text.size() + text.size() / 2);
    for (const char c : text) {
      if (c == ' ') {
        out += metaspace.mark;
      } else {
        out += c;
      }
    }
    const bool prepends = metaspace.prepend == Metaspace::Where::Always ||
                          (metaspace.prepend == Metaspace::Where::First && piece.first);
    if (prepends && !out.starts_with(metaspace.mark)) out.insert(0, metaspace.mark);
    return out;
  };
  const std::string text = marked(piece.text);
  const std::string masked =
      piece.text.data() == piece.masked.data() ? std::string() : marked(piece.masked);
  const Piece whole{text, masked.empty() ? std::string_view(text) : masked, piece.first};
  if (!metaspace.split) return apply(step + 1, whole);
  apply({.delimiter = metaspace.mark, .behavior = SplitBehavior::MergedWithNext}, step, whole);
}

void PreTokenizer::Run::apply(const PrefixSpace&, std::size_t step, const Piece& piece) {
  if (piece.text.starts_with(' ')) return apply(step + 1, piece);
  const std::string text = " " + std::string(piece.text);
  const std::string masked = " " + std::string(piece.masked);
  apply(step + 1, {text, masked, piece.first});
}

}  // namespace tessera::io
