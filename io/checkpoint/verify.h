#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"

namespace tessera::io {

struct VerifyProblem {
  std::string file;
  std::string tensor;               ///< "model/wte.weight"; empty: the whole file
  std::int64_t begin = 0, end = 0;  ///< elements, row-major inside the chunk's box; equal: unknown
  std::string what;
  std::int64_t byte_begin = 0, byte_end = 0;  ///< of the elements in the file; equal: unknown
  bool unread = false;  ///< an I/O error prevented reading; the data may be intact
  /// "rank-...: tensor model/wte.weight, elements 0 to 96 (bytes 512 to 896): the checksum is
  /// wrong"
  std::string str() const;
};

struct VerifyReport {
  std::vector<VerifyProblem> problems;
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;  ///< tensor data read
};

struct VerifyOptions {
  int threads = 1;  ///< each takes 1 MiB of memory
  /// Called with the bytes of tensor data read and the total. Calls are serialized.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
  /// Shards to verify; absent: all shards and trainer.json.
  std::optional<std::set<std::string>> files{};
};

/// Reads a whole checkpoint. Checks the sizes of files, the header of each shard against the index,
/// checksums, finiteness of floating-point values, and the trainer section. Continues after a
/// problem. The report does not depend on the number of threads.
VerifyReport verify_checkpoint(const fs::path& dir, const CheckpointIndex& index,
                               const VerifyOptions& options = {});
VerifyReport verify_checkpoint(const CheckpointReader& reader, const VerifyOptions& options = {});

}  // namespace tessera::io
