#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/data/token_source.h"
#include "io/data/tokenizer.h"

namespace tessera::io {

/// Paths in the order given; one that names no file may be a glob ("data/*.bin"), whose matches are
/// sorted. @throws IoError if a glob matches nothing
std::vector<std::string> expand_globs(const std::vector<std::string>& patterns);

/// True for token files: their name ends in ".bin", every other file is text.
bool is_token_file(const std::string& path);

struct DatasetOptions {
  std::vector<std::string> train = {};  ///< files or globs: all token files, or all text
  std::vector<std::string> val = {};    ///< the same; empty: split off the training text
  std::string tokenizer = "bytes";      ///< for text: "bytes", "chars", or a tokenizer file
  /// Part at the end of a training text kept for validation, in [0, 1), if val is empty. Token
  /// files are never split.
  double val_fraction = 0.1;
  std::int64_t vocab_size = 0;  ///< of the model; larger ids are refused. 0: from the data
  TokenizerPtr fixed_tokenizer = nullptr;  ///< the model's own; overrides `tokenizer`
  bool refuse_text = false;                ///< the model has no tokenizer: only token files fit it
};

struct Dataset {
  TokenSourcePtr train;
  TokenSourcePtr val;      ///< null if there is none
  TokenizerPtr tokenizer;  ///< null for token files
  /// The option; if that is 0, the tokenizer's, or one more than the largest id of the token files.
  std::int64_t vocab_size = 0;
  std::vector<std::string> warnings;  ///< what looks odd about the files, a sentence each
};

/// Opens training and validation data. The vocabulary of chars is the sorted set of characters of
/// all text, as in nanoGPT's character example; such text is held in memory as 2 bytes per
/// character, everything else stays on disk.
/// @throws IoError or CorruptCheckpoint on files that cannot be read, are malformed, or are
///   recognized as something else (an archive, a NumPy array, JSONL, ...); InvalidArgument on
///   options that don't fit each other or the data
Dataset open_dataset(const DatasetOptions& options);

}  // namespace tessera::io
