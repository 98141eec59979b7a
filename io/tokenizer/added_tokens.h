#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// A token that is found in the text before anything else, such as <|endoftext|>.
struct AddedToken {
  std::int32_t id = 0;
  std::string text = {};
  bool special = false;      ///< a control token, not text
  bool single_word = false;  ///< found only between characters that are not \w
  bool lstrip = false;       ///< takes white space before it
  bool rstrip = false;       ///< takes white space after it
  bool normalized = false;   ///< searched for in normalized text
  std::string pattern = {};  ///< what is searched for, if not `text`

  const std::string& searched() const { return pattern.empty() ? text : pattern; }
};

/// Finds tokens in text: the leftmost, of those the longest. Immutable and thread-safe.
class TokenFinder {
 public:
  TokenFinder() = default;
  /// Tokens of no text are ignored; of two of the same text, the first one counts.
  explicit TokenFinder(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }
  /// Calls `on_text` for texts between tokens, which are not empty, and `on_token` for tokens, in order.
  void split(std::string_view text, const std::function<void(std::string_view)>& on_text,
             const std::function<void(std::int32_t)>& on_token) const;

 private:
  struct Node {
    std::int32_t token = -1;  // index in tokens_ of what ends here
    std::vector<std::pair<unsigned char, std::int32_t>> next = {};  // by byte
  };
  std::int32_t child(std::int32_t node, unsigned char byte) const;
  /// The longest token at the start of `text`; nullptr if there is none.
  const AddedToken* longest(std::string_view text) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<bool, 256> starts_{};
};

}  // namespace tessera::io
