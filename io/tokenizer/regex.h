#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::io {

/// Dialect of a pattern: Ruby syntax of Oniguruma (Hugging Face's tokenizers), or that of Rust's
/// fancy-regex crate (tiktoken).
enum class RegexSyntax { Oniguruma, Rust };

/// Rewrites a pattern for PCRE2 with UTF and UCP. What both syntaxes share is kept.
/// @throws Unsupported on syntax with another meaning in PCRE2 that cannot be rewritten
std::string translate_regex(std::string_view pattern, RegexSyntax syntax);

/// A compiled pattern. Immutable and thread-safe.
class Regex {
 public:
  /// @param where  of the pattern, for errors: file and field
  /// @throws Unsupported, naming `where`
  Regex(std::string_view pattern, RegexSyntax syntax, std::string_view where);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  /// Whether matches depend on the text before them: assertions such as \b, ^ and (?<=x).
  bool looks_behind() const;

 private:
  friend class RegexMatches;
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

/// Iterates over the non-overlapping matches in a text. For one thread.
class RegexMatches {
 public:
  explicit RegexMatches(const Regex& regex);
  ~RegexMatches();
  RegexMatches(const RegexMatches&) = delete;
  RegexMatches& operator=(const RegexMatches&) = delete;

  /// Restarts in a text of valid UTF-8, which must stay alive.
  void start(std::string_view text);
  /// Next match: bytes [begin, end), possibly empty. @return false if there are no more
  /// @throws InvalidArgument if the pattern needs too much backtracking or memory on this text
  bool next(std::size_t& begin, std::size_t& end);

 private:
  int match(std::size_t from);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::io
