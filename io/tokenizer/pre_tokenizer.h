#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "io/tokenizer/regex.h"

namespace tessera::io {

/// GPT-2's pattern, which ByteLevel splits with.
inline constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Treatment of the delimiters at which a text is split.
enum class SplitBehavior { Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous };

/// Splits at delimiters: matches of a pattern, occurrences of a text, or characters of a class.
struct Split {
  std::variant<std::shared_ptr<const Regex>, std::string, bool (*)(char32_t)> delimiter;
  SplitBehavior behavior = SplitBehavior::Isolated;
  bool invert = false;  ///< what is between them are the delimiters
};
/// Replaces spaces by a mark, and prepends it.
struct Metaspace {
  enum class Where { Always, First, Never };
  std::string mark = "\xE2\x96\x81";  ///< "▁"
  Where prepend = Where::Always;
  bool split = true;
};
/// Prepends a space to texts without one at the start.
struct PrefixSpace {};
using PreTokenizerStep = std::variant<Split, Metaspace, PrefixSpace>;

/// Splits a text into words, in which tokens are found: a sequence of steps. Immutable and thread-safe.
class PreTokenizer {
 public:
  PreTokenizer() = default;
  explicit PreTokenizer(std::vector<PreTokenizerStep> steps);
  /// Cuts words before `mark` where another character precedes it; for vocabularies without tokens across.
  void cut_before(std::string mark) { cut_before_ = std::move(mark); }

  /// Whether the words from a word boundary on do not depend on the text before it.
  bool can_cut() const;

  /// Memory of an encoding thread.
  class Run {
   public:
    /// @param on_word  called for each word, in order
    Run(const PreTokenizer& steps, std::function<void(std::string_view)> on_word);
    /// @param text    any bytes
    /// @param masked  of the same size, valid UTF-8, for regular expressions; see mask_for_regex()
    /// @param first   whether it begins the text to encode
    void split(std::string_view text, std::string_view masked, bool first);

   private:
    struct Piece {
      std::string_view text, masked;
      bool first;
    };
    void apply(std::size_t step, const Piece& piece);
    void apply(const Split& split, std::size_t step, const Piece& piece);
    void apply(const Metaspace& metaspace, std::size_t step, const Piece& piece);
    void apply(const PrefixSpace&, std::size_t step, const Piece& piece);
    void put_word(std::string_view text);
    template <typename OnRange>
    void find_delimiters(const Split& split, std::size_t step, const Piece& piece,
                         const OnRange& on_range);

    const PreTokenizer& steps_;
    std::function<void(std::string_view)> on_word_;
    std::vector<std::unique_ptr<RegexMatches>> matches_;  // of each step
  };

 private:
  std::vector<PreTokenizerStep> steps_;
  std::string cut_before_;
};

}  // namespace tessera::io
