#include "io/tokenizer/added_tokens.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

/// Offset of the character that ends at `end`.
std::size_t previous_character(std::string_view text, std::size_t end) {
  do --end;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U);
  return end;
}

bool ends_with_word(std::string_view text) {
  return !text.empty() &&
         is_word_character(code_point_at(text, previous_character(text, text.size())));
}

std::size_t space_before(std::string_view text, std::size_t end) {
  while (end > 0) {
    const std::size_t previous = previous_character(text, end);
    if (!is_white_space(code_point_at(text, previous))) break;
    end = previous;
  }
  return end;
}

std::size_t space_after(std::string_view text, std::size_t begin) {
  while (begin < text.size() && is_white_space(code_point_at(text, begin)))
    begin += utf8_length(text[begin]);
  return std::min(begin, text.size());
}

}  // namespace

TokenFinder::TokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::erase_if(tokens_, [](const AddedToken& token) { return token.text.empty(); });
  nodes_.resize(1);
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& text = tokens_[i].searched();
    starts_[static_cast<unsigned char>(text[0])] = true;
    std::int32_t node = 0;
    for (const char c : text) {
      std::int32_t next = child(node, static_cast<unsigned char>(c));
      if (next < 0) {
        next = static_cast<std::int32_t>(nodes_.size());
        nodes_.emplace_back();
        nodes_[static_cast<std::size_t>(node)].next.emplace_back(static_cast<unsigned char>(c),
                                                                 next);
      }
      node = next;
    }
    Node& last = nodes_[static_cast<std::size_t>(node)];
    if (last.token < 0) last.token = static_cast<std::int32_t>(i);
  }
  for (Node& node : nodes_) std::ranges::sort(node.next);
}

std::int32_t TokenFinder::child(std::int32_t node, unsigned char byte) const {
  const auto& next = nodes_[static_cast<std::size_t>(node)].next;
  for (const auto& [label, target] : next)
    if (label == byte) return target;
  return -1;
}

const AddedToken* TokenFinder::longest(std::string_view text) const {
  std::int32_t node = 0, token = -1;
  for (const char c : text) {
    node = child(node, static_cast<unsigned char>(c));
    if (node < 0) break;
    if (const std::int32_t here = nodes_[static_cast<std::size_t>(node)].token; here >= 0)
      token = here;
  }
  return token < 0 ? nullptr : &tokens_[static_cast<std::size_t>(token)];
}

void TokenFinder::split(std::string_view text, const std::function<void(std::string_view)>& on_text,
                        const std::function<void(std::int32_t)>& on_token) const {
  std::size_t done = 0;  // what was passed on
  for (std::size_t i = 0; i < text.size() && !tokens_.empty();) {
    if (!starts_[static_cast<unsigned char>(text[i])]) {
      ++i;
      continue;
    }
    const AddedToken* token = longest(text.substr(i));
    if (token == nullptr) {
      ++i;
      continue;
    }
    std::size_t begin = i;
    std::size_t end = i + token->searched().size();
    i = end;
    if (token->single_word &&
        (ends_with_word(text.substr(0, begin)) ||
         (end < text.size() && is_word_character(code_point_at(text, end))))) {
      continue;
    }
    if (token->lstrip) begin = std::max(space_before(text, begin), done);
    if (token->rstrip) end = space_after(text, end);
    if (done < begin) on_text(text.substr(done, begin - done));
    on_token(token->id);
    done = end;
  }
  if (done < text.size()) on_text(text.substr(done));
}

}  // namespace tessera::io
