#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"

namespace tessera::io {

/// Something wrong in the data of a checkpoint.
struct VerifyProblem {
  std::string file;
  std::string tensor;  ///< with its section: "model/wte.weight"; empty if it is the whole file
  std::int64_t begin = 0, end = 0;  ///< elements, row-major inside the chunk's box; or equal
  std::string what;
  /// "rank-...: tensor model/wte.weight, elements 0 to 96: the checksum is wrong"
  std::string str() const;
};

struct VerifyReport {
  std::vector<VerifyProblem> problems;
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;  ///< of tensor data read
};

/// Reads every chunk of a checkpoint whose index is valid: checksums, finiteness of floating-point
/// values, whether each shard's own header tells the same as the index, and the trainer section.
/// Goes on after a problem. Takes 1 MiB of memory.
VerifyReport verify_checkpoint(const CheckpointReader& reader);

}  // namespace tessera::io
