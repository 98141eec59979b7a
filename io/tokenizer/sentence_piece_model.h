#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer/pipeline.h"

namespace tessera::io {

/// A piece of a SentencePiece model.
struct SentencePiece {
  enum Type { Normal = 1, Unknown = 2, Control = 3, UserDefined = 4, Unused = 5, Byte = 6 };
  std::string text = {};
  float score = 0;
  int type = Normal;
};
/// Content of a SentencePiece model file that encoding needs.
struct SentencePieceModel {
  std::vector<SentencePiece> pieces = {};
  bool is_bpe = false;
  bool byte_fallback = false;
  bool space_is_suffix = false;
  bool has_normalization_table = false;
  bool add_dummy_prefix = true, remove_extra_spaces = true, escape_spaces = true;
};

/// Reads a serialized ModelProto of sentencepiece_model.proto. Empty if it is malformed.
std::optional<SentencePieceModel> parse_sentence_piece_model(std::string_view bytes);

/// The same BPE as a pipeline, which is faster than libsentencepiece; empty unless the model is a BPE
/// without normalization, as those of Llama, Mistral and Gemma are. Encodes valid UTF-8 only.
std::optional<Pipeline> sentence_piece_pipeline(const SentencePieceModel& model);

}  // namespace tessera::io
