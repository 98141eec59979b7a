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
  int threads = 1;  ///< each takes 3 MiB of memory
  /// Called with the bytes read and the total, over both checkpoints. Calls are serialized.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
};

/// A tensor that differs between checkpoints A and B.
struct TensorDifference {
  enum class Kind : std::uint8_t { OnlyInA, OnlyInB, Shape, Dtype, Values };
  std::string name;  ///< section and name: "model/wte.weight"
  Kind kind = Kind::Values;
  DType dtype_a = DType::F32, dtype_b = DType::F32;
  Shape shape_a, shape_b;
  // Set for Values and Dtype. If only one side is infinite or NaN, the difference is infinite.
  std::int64_t elements = 0;     ///< number of elements of the tensor
  std::int64_t count = 0;        ///< elements that differ by more than the tolerance
  std::int64_t first = 0;        ///< first element that differs so, row-major
  double max_absolute = 0;       ///< largest |a - b|
  double max_relative = 0;       ///< largest |a - b| / max(|a|, |b|)
  std::int64_t max_element = 0;  ///< first element where |a - b| is max_absolute
  double a = 0, b = 0;           ///< values of element max_element
};

struct DiffReport {
  std::vector<TensorDifference> differences;  ///< by section, then by name
  /// Keys of the "model" section of the configuration that differ, with both values as JSON.
  struct Setting {
    std::string key, a, b;  ///< a or b is empty if the key is absent
  };
  std::vector<Setting> settings;
  std::int64_t compared = 0;    ///< tensors in both checkpoints
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
