#pragma once

#include <cstddef>
#include <string>
#include <variant>
#include <vector>

#include "io/tokenizer/normalizer.h"

namespace tessera::io {

/// Tokens <0x00> to <0xFF> become bytes.
struct BytesFromTokens {};
/// Joins all tokens to one.
struct Fuse {};
/// Strips up to `start` and `stop` characters `text` from both ends of each token.
struct StripEnds {
  std::string text;
  std::size_t start = 0, stop = 0;
};
/// The mark of Metaspace becomes a space, and nothing in the first token.
struct SpaceFromMark {
  std::string mark;
  bool drops_first = true;
};
using DecoderStep = std::variant<BytesFromTokens, Fuse, StripEnds, SpaceFromMark, Replace>;

/// Turns tokens into text: a sequence of steps, then joins them. Immutable and thread-safe. The text
/// of a token does not depend on later ones: where the reference replaces incomplete characters by
/// U+FFFD, their bytes are kept.
class Decoder {
 public:
  /// Joins tokens with `separator`.
  explicit Decoder(std::vector<DecoderStep> steps = {}, std::string separator = {})
      : steps_(std::move(steps)), separator_(std::move(separator)) {}
  std::string decode(std::vector<std::string> tokens) const;

 private:
  std::vector<DecoderStep> steps_;
  std::string separator_;
};

}  // namespace tessera::io
