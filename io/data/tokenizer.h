#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

struct TokenizerFiles;

/// A token with a meaning of its own, such as <|endoftext|>.
struct SpecialToken {
  std::int32_t id = 0;
  std::string text;
};

/// Encodes texts one after the other and keeps its caches between them. For one thread; the tokenizer
/// must outlive it.
class Encoder {
 public:
  /// Bytes after a cut that decide whether a token crosses it.
  static constexpr std::size_t kCutContext = std::size_t{16} << 10;

  virtual ~Encoder() = default;
  /// Appends the ids of a text. @throws as Tokenizer::encode
  virtual void encode(std::string_view text, std::string_view name,
                      std::vector<std::int32_t>& out) = 0;
  /// Appends the ids of text[0, end) as the encoding of a whole document has them, where text[0]
  /// begins the document or follows such a cut. Only if Tokenizer::can_cut().
  /// @param text  goes on behind `end` for kCutContext bytes or to the end of the document
  /// @return false if a token crosses `end`, or may do so
  virtual bool encode_part(std::string_view text, std::size_t end, std::string_view name,
                           std::vector<std::int32_t>& out) = 0;
};

/// Converts text to token ids and back. Immutable and thread-safe.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// "bytes", "chars", "bpe", "sentencepiece", "tiktoken"
  virtual std::string_view kind() const = 0;
  virtual std::int64_t vocab_size() const = 0;
  /// @param name  of the text in messages
  /// @throws InvalidArgument on text outside the vocabulary, with its position
  virtual std::vector<std::int32_t> encode(std::string_view text,
                                           std::string_view name = "text") const = 0;
  /// For many texts; faster than encode().
  virtual std::unique_ptr<Encoder> make_encoder() const;
  /// Whether a long document can be encoded in parts; see Encoder::encode_part().
  virtual bool can_cut() const { return false; }
  /// @throws InvalidArgument on an id outside the vocabulary
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;
  /// {"type":"bytes"}, {"type":"chars","vocabulary":"..."}, or {"type":"files",...} with the files that
  /// the tokenizer was read from. Inverse of tokenizer_from_json().
  virtual std::string to_json() const = 0;

  /// The files that it was read from, as in to_json(); null for bytes and chars.
  virtual const TokenizerFiles* files() const { return nullptr; }

  /// Ids that the tokenizer's authors put before and after a text; encode() leaves them out.
  virtual std::vector<std::int32_t> prefix() const { return {}; }
  virtual std::vector<std::int32_t> suffix() const { return {}; }
  /// Prefix, ids of the text, suffix.
  std::vector<std::int32_t> encode_document(std::string_view text,
                                            std::string_view name = "text") const;
  /// Beginning and end of a text; -1 if unknown.
  virtual std::int32_t bos_id() const { return -1; }
  virtual std::int32_t eos_id() const { return -1; }
  /// encode() finds their texts in text.
  virtual std::vector<SpecialToken> special_tokens() const { return {}; }
};
using TokenizerPtr = std::shared_ptr<const Tokenizer>;

/// One token per byte, 256 ids. decode() may return incomplete UTF-8 characters.
TokenizerPtr make_byte_tokenizer();
/// One token per character (Unicode code point); ids follow the sorted vocabulary.
/// @param vocabulary  sorted and without repeats
/// @throws InvalidArgument if it is empty, unsorted, or over 65536 characters
TokenizerPtr make_char_tokenizer(std::u32string vocabulary);

/// @param source  of the JSON text, named in errors about its syntax
/// @throws CorruptCheckpoint on malformed JSON, InvalidArgument on a malformed description,
///   Unsupported on an unknown type
TokenizerPtr tokenizer_from_json(std::string_view text, const std::string& source = "tokenizer");
/// Reads a tokenizer file, or a directory that holds one: the JSON of to_json(), Hugging Face's
/// tokenizer.json, vocab.json and merges.txt, a SentencePiece model, tiktoken's ranks, or Mistral's tekken.json.
/// The content decides.
/// @throws IoError, InvalidArgument, Unsupported; messages name the file
TokenizerPtr load_tokenizer(const std::string& path);

}  // namespace tessera::io
