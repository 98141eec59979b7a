#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"
#include "io/pump/compare.h"

namespace tessera::io {

struct DiffReport {
  std::vector<TensorDifference> differences;  ///< by section, then by name
  /// Keys of the "model" section of the configuration that differ, with both values as JSON.
  struct Setting {
    std::string key, a, b;  ///< a or b is empty if the key is absent
  };
  std::vector<Setting> settings;
  std::int64_t rounded = 0;     ///< tensors with is_rounding() that DiffOptions::rounded accepts
  std::int64_t compared = 0;    ///< tensors in both checkpoints
  std::int64_t bytes_read = 0;  ///< 0 if all checksums are equal

  bool equal() const { return differences.empty() && settings.empty(); }
};

/// Compares pairs of tensors and adds those that differ, in order of their names.
/// @throws as compare_pairs
void add_pairs(DiffReport& report, std::vector<ComparedPair>& pairs, const DiffOptions& options);

/// Compares two checkpoints of any world sizes. Reads and verifies only tensors whose checksums in
/// the indexes differ.
/// @throws InvalidArgument if a requested section is missing, IoError, CorruptCheckpoint naming
///         file, tensor and elements
DiffReport diff_checkpoints(const CheckpointReader& a, const CheckpointReader& b,
                            const DiffOptions& options);

}  // namespace tessera::io
