#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/pump/layout.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// A tensor that differs between A and B.
struct TensorDifference {
  enum class Kind : std::uint8_t { OnlyInA, OnlyInB, Shape, Dtype, Values };
  std::string name;  ///< section and name: "model/wte.weight"
  Kind kind = Kind::Values;
  DType dtype_a = DType::F32, dtype_b = DType::F32;
  Shape shape_a, shape_b;
  /// safetensors name of a dtype that tessera lacks; dtype_a or dtype_b is then the integer dtype of
  /// the same size, as which values are compared. Else empty.
  std::string opaque_a = {}, opaque_b = {};
  // Set for Values and Dtype. If only one side is infinite or NaN, the difference is infinite.
  std::int64_t elements = 0;     ///< number of elements of the tensor
  std::int64_t count = 0;        ///< elements that differ by more than the tolerance
  std::int64_t first = 0;        ///< first element that differs so, row-major
  double max_absolute = 0;       ///< largest |a - b|
  double max_relative = 0;       ///< largest |a - b| / max(|a|, |b|)
  std::int64_t max_element = 0;  ///< first element where |a - b| is max_absolute
  double a = 0, b = 0;           ///< values of element max_element
  /// Number of elements of different dtypes that differ even after the wider floating-point dtype
  /// is rounded to the narrower one. All elements if neither is narrower.
  std::int64_t unrounded = 0;

  /// Whether the values of one dtype are those of the other, rounded.
  bool is_rounding() const { return kind == Kind::Dtype && elements > 0 && unrounded == 0; }
};

/// Where and how the elements of a tensor are stored.
struct ComparedTensor {
  const TensorSource* source = nullptr;
  std::string name{};  ///< at the source
  std::optional<Swap> swap{};
  Encoding stored = Encoding::Plain;  ///< Q8_0: compared as f32
};

/// Tensors with equal shapes.
struct ComparedPair {
  ComparedTensor a, b;
  TensorDifference difference;  ///< of kind Values or Dtype; receives the counts
};

struct DiffOptions {
  bool model = true, optimizer = false;  ///< sections to compare; not for compare_pairs
  /// Values a and b are equal if |a - b| <= absolute + relative * max(|a|, |b|). Both 0: bitwise.
  double absolute = 0, relative = 0;
  bool rounded = false;  ///< accept tensors with is_rounding(); not for compare_pairs
  int threads = 1;       ///< each takes 4 MiB of memory
  /// Called with the bytes compared and the total, over both sides. Calls are serialized.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
};

/// Compares the values of pairs; of different dtypes, after widening them to f64. Verifies
/// checksums. The result does not depend on the number of threads.
/// @return bytes of both sides
/// @throws Unsupported if the values of a pair of kind Dtype cannot be compared; IoError,
///         CorruptCheckpoint
std::int64_t compare_pairs(std::vector<ComparedPair>& pairs, const DiffOptions& options);

}  // namespace tessera::io
