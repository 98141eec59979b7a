#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"

namespace tessera::io {

struct DiffOptions {
  bool model = true, optimizer = false;  ///< sections to compare
  /// Values a and b are equal if |a - b| <= absolute + relative * max(|a|, |b|). Both 0: bitwise.
  double absolute = 0, relative = 0;
  int threads = 1;  ///< 3 MiB of memory each
  /// Bytes read and in total, of both checkpoints. Calls are serialized.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
};

/// A tensor that differs between checkpoints A and B.
struct TensorDifference {
  enum class Kind : std::uint8_t { OnlyInA, OnlyInB, Shape, Dtype, Values };
  std::string name;  ///< with its section: "model/wte.weight"
  Kind kind = Kind::Values;
  DType dtype_a = DType::F32, dtype_b = DType::F32;
  Shape shape_a, shape_b;
  // For Values and Dtype. An infinity or NaN on one side only is an infinite difference.
  std::int64_t elements = 0;     ///< of the tensor
  std::int64_t count = 0;        ///< elements that differ by more than the tolerance
  std::int64_t first = 0;        ///< first of these, row-major
  double max_absolute = 0;       ///< of |a - b|
  double max_relative = 0;       ///< of |a - b| / max(|a|, |b|)
  std::int64_t max_element = 0;  ///< first element with max_absolute
  double a = 0, b = 0;           ///< values of max_element
};

struct DiffReport {
  std::vector<TensorDifference> differences;  ///< by section, then by name
  /// Keys of the "model" section of the configuration that differ, with both values as JSON.
  struct Setting {
    std::string key, a, b;  ///< empty: absent
  };
  std::vector<Setting> settings;
  std::int64_t compared = 0;    ///< tensors that both have
  std::int64_t bytes_read = 0;  ///< 0 if all checksums are equal

  bool equal() const { return differences.empty() && settings.empty(); }
};

/// Compares two checkpoints of any world sizes. Reads and verifies only tensors whose checksums in
/// the indexes differ.
/// @throws InvalidArgument if a requested section is missing, IoError, CorruptCheckpoint naming
///         file, tensor and elements
DiffReport diff_checkpoints(const CheckpointReader& a, const CheckpointReader& b,
                            const DiffOptions& options);

}  // namespace tessera::io
