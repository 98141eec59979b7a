#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"

namespace tessera::io {

/// Damage in a checkpoint.
struct VerifyProblem {
  std::string file;
  std::string tensor;  ///< with its section: "model/wte.weight"; empty if it is the whole file
  std::int64_t begin = 0, end = 0;  ///< elements, row-major inside the chunk's box; or equal
  std::string what;
  std::int64_t byte_begin = 0, byte_end = 0;  ///< of these elements in the file; or equal
  bool unread = false;  ///< an error of the disk kept it from being read; it may be intact
  /// "rank-...: tensor model/wte.weight, elements 0 to 96 (bytes 512 to 896): the checksum is
  /// wrong"
  std::string str() const;
};

struct VerifyReport {
  std::vector<VerifyProblem> problems;
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;  ///< of tensor data read
};

struct VerifyOptions {
  int threads = 1;  ///< each takes 1 MiB of memory
  /// Called from one thread at a time: bytes of tensor data done and in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
  /// Shards to verify; absent: all, and trainer.json.
  std::optional<std::set<std::string>> files{};
};

/// Reads every byte of a checkpoint and checks sizes of files, checksums, finiteness of
/// floating-point values, that each shard's own header agrees with the index, and the trainer
/// section. Continues after a problem. The report does not depend on the number of threads.
VerifyReport verify_checkpoint(const fs::path& dir, const CheckpointIndex& index,
                               const VerifyOptions& options = {});
VerifyReport verify_checkpoint(const CheckpointReader& reader, const VerifyOptions& options = {});

}  // namespace tessera::io
