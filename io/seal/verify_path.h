#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/base/file.h"
#include "io/checkpoint/verify.h"

namespace tessera::io {

/// Result of verifying a checkpoint or model of any format.
struct PathReport {
  fs::path path;  ///< of a run, its checkpoint
  VerifyReport verify;
  std::string sealed;                   ///< time of the seal; empty: none
  std::vector<std::string> additional;  ///< files that the seal does not list
  std::string unread;                   ///< why the tensors of intact files were not read
};

/// Whether verify_path() takes a path as files of another program: what open_foreign() opens, or
/// anything with a seal.
bool is_foreign_or_sealed(const fs::path& path);

/// Reads everything and compares it with the checksums that the format has, and with the seal.
/// Damage, also such that prevents opening, is a problem in the report.
/// @param step  of a run of tessera; empty: its newest checkpoint
/// @throws InvalidArgument if the path is nothing of that, or has no such step; Unsupported,
///         IoError as the open functions of each form
PathReport verify_path(const fs::path& path, std::optional<std::int64_t> step,
                       const VerifyOptions& options);

}  // namespace tessera::io
