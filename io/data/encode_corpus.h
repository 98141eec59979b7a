#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/data/corpus.h"
#include "io/data/tokenize.h"

namespace tessera::io {

/// Tokens of a batch.
struct EncodedBatch {
  struct Unit {
    CorpusPosition at;
    std::int64_t tokens = 0;
    bool is_document = false;  ///< begins one
    std::string error = {};    ///< why it was skipped
  };
  std::vector<Unit> units;
  std::string ids;  ///< little-endian, 2 or 4 bytes each
  std::int64_t text_bytes = 0;
  std::int64_t consumed = 0;  ///< see CorpusBatch
};

/// Encodes the sources of a range from a position on, on TokenizeOptions::threads threads.
/// @param cut  see CorpusOptions
/// @param use  gets the batches in order, one at a time
/// @throws what `use` throws; CutInToken; as tokenize_to_file
void encode_corpus(const TokenizeOptions& options, const FileRange& range,
                   const CorpusPosition& from, const std::function<bool(std::int64_t file)>& cut,
                   const std::function<void(const EncodedBatch&)>& use);

/// A token crosses the end of a unit, or may do so: the document must not be cut.
class CutInToken : public Error {
 public:
  explicit CutInToken(std::int64_t source) : Error("a token crosses a cut"), file(source) {}
  std::int64_t file;
};

}  // namespace tessera::io
