#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "io/tokenizer/regex.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io {

struct Lowercase {};
struct StripAccents {};
struct Prepend {
  std::string text;
};
struct StripSpace {
  bool left = true, right = true;
};
struct Replace {
  std::string text = {};  ///< searched for, unless there is a pattern
  std::shared_ptr<const Regex> pattern = {};
  std::string by = {};
};
using NormalizerStep =
    std::variant<NormalForm, Lowercase, StripAccents, Prepend, StripSpace, Replace>;

/// Changes a text before it is split: a sequence of steps. Immutable and thread-safe.
class Normalizer {
 public:
  Normalizer() = default;
  explicit Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {}

  bool empty() const { return steps_.empty(); }
  /// @param text  valid UTF-8
  std::string apply(std::string_view text) const;
  /// Whether parts of a text can be normalized on their own, at boundaries that are no characters.
  bool is_local() const;

 private:
  std::vector<NormalizerStep> steps_;
};

/// Replaces all occurrences, from left to right.
std::string replace_all(std::string_view text, const Replace& replace);

}  // namespace tessera::io
