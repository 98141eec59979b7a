#pragma once

#include <initializer_list>
#include <vector>

#include "core/base/shape.h"

namespace tessera {

/// Numbers in nested braces, as in {{1, 2}, {3, 4}}: an argument of Tensor::from.
class NestedValues {
 public:
  NestedValues(double value);  // NOLINT(google-explicit-constructor)
  /// @throws InvalidArgument unless all parts have the same shape
  NestedValues(std::initializer_list<NestedValues> parts);

  const Shape& shape() const { return shape_; }
  /// Row-major.
  const std::vector<double>& values() const { return values_; }

 private:
  Shape shape_;
  std::vector<double> values_;
};

}  // namespace tessera
