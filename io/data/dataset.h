#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/chat/conversations.h"
#include "io/data/token_source.h"
#include "io/data/tokenizer.h"

namespace tessera::io {

/// Returns paths in the given order; replaces globs ("data/*.bin") by their sorted matches.
/// @throws IoError if a glob matches nothing
std::vector<std::string> expand_globs(const std::vector<std::string>& patterns);

/// Date that templates see in training. It does not change, so that a resumed run has the same tokens.
inline constexpr const char* kChatDate = "2024-07-26";

/// Whether the name ends in ".bin"; files that are not conversations either are text.
bool is_token_file(const std::string& path);

struct DatasetOptions {
  /// Files, globs or directories of token shards: all token files, all conversations
  /// (is_conversation_file()), or all text.
  std::vector<std::string> train = {};
  std::vector<std::string> val = {};  ///< same kind as train; empty: split off the training text
  std::string tokenizer = "bytes";  ///< for text: "bytes", "chars", or what load_tokenizer() reads
  /// Fraction at the end of the training text or conversations used for validation if val is empty, in
  /// [0, 1). Token files are never split.
  double val_fraction = 0.1;
  std::int64_t vocab_size = 0;  ///< of the model; ids must be below it. 0: derived from the data
  TokenizerPtr fixed_tokenizer = nullptr;  ///< tokenizer of the model; overrides `tokenizer`
  bool refuse_text = false;                ///< accept only token files: the model has no tokenizer
  std::string no_tokenizer = {};           ///< why it has none, for the error
  std::string chat_template = {};     ///< for conversations: a file; empty: the tokenizer's own
  std::string chat_date = kChatDate;  ///< for conversations: what strftime_now() formats
};

struct Dataset {
  TokenSourcePtr train;  ///< null for conversations
  /// Tokens of each entry of DatasetOptions::train, `train` in all; empty for conversations,
  /// and where validation data was split off.
  std::vector<TokenSourcePtr> train_parts;
  TokenSourcePtr val;                                      ///< null if there is none
  std::shared_ptr<const Conversations> conversations;      ///< null for token files and text
  std::shared_ptr<const Conversations> val_conversations;  ///< null if there is none
  /// With DatasetOptions::chat_template, if given. Of token files, that of directories of shards,
  /// if all have the same; else null.
  TokenizerPtr tokenizer;
  std::string tokenizer_file;  ///< of such directories; empty: the tokenizer is from elsewhere
  /// DatasetOptions::vocab_size; if 0, the size of the tokenizer, of text or of directories of token shards,
  /// or 1 + the largest id in token files.
  std::int64_t vocab_size = 0;
  std::vector<std::string> warnings;  ///< from inspect_data_file
};

/// Opens training and validation data. The vocabulary of "chars" is the sorted set of characters of
/// all text, as in nanoGPT's character example. Text takes 2 or 4 bytes of memory per token, unless
/// tokens are bytes; other data stays on disk. Each text file is a document: it begins and ends with the
/// special tokens that the tokenizer's authors chose.
/// @throws IoError or CorruptCheckpoint on files that are unreadable, malformed, or of another
///   format (an archive, a NumPy array, JSONL, ...); InvalidArgument on options that contradict
///   each other or the data
Dataset open_dataset(const DatasetOptions& options);

}  // namespace tessera::io
