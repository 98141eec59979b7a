#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/data/token_source.h"
#include "io/data/tokenizer.h"

namespace tessera::io {

/// Paths in the order given; each may be a glob ("data/*.bin"), whose matches are sorted.
/// @throws IoError if a glob matches nothing
std::vector<std::string> expand_globs(const std::vector<std::string>& patterns);

/// True for token files, which are told from text by their name: it ends in ".bin".
bool is_token_file(const std::string& path);

struct DatasetOptions {
  std::vector<std::string> train = {};  ///< files or globs: all token files, or all text
  std::vector<std::string> val = {};    ///< the same; empty: split off the training text
  std::string tokenizer = "bytes";      ///< for text: "bytes", "chars", or a tokenizer file
  /// Part at the end of a training text kept for validation, in [0, 1), if val is empty. Measured
  /// in characters for chars, in bytes for bytes. Token files are never split.
  double val_fraction = 0.1;
  std::int64_t vocab_size = 0;  ///< of the model; ids from here on are refused. 0: from the data
  /// Takes the place of `tokenizer` where a model brings its own.
  TokenizerPtr fixed_tokenizer = nullptr;
  /// True for a model that came without a tokenizer: text is refused, since its ids would mean
  /// something else to the model.
  bool refuse_text = false;
};

struct Dataset {
  TokenSourcePtr train;
  TokenSourcePtr val;      ///< null if there is none
  TokenizerPtr tokenizer;  ///< null for token files
  /// The option; if that is 0 the tokenizer's, or one more than the largest id of the token files
  /// (found by reading them once).
  std::int64_t vocab_size = 0;
};

/// Opens what a run reads. The vocabulary of chars is the sorted set of characters of all training
/// and validation text, as in nanoGPT's character example; such text is held in memory as 2 bytes
/// per character, everything else stays on disk.
/// @throws IoError or CorruptCheckpoint on files that cannot be read or are malformed,
/// InvalidArgument on options that
///   don't fit each other or the data
Dataset open_dataset(const DatasetOptions& options);

}  // namespace tessera::io
