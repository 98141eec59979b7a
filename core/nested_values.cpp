#include "core/nested_values.h"

namespace tessera {

NestedValues::NestedValues(double value) : values_{value} {}

NestedValues::NestedValues(std::initializer_list<NestedValues> parts) {
  shape_.push_back(static_cast<std::int64_t>(parts.size()));
  if (parts.size() == 0) return;
  const Shape& inner = parts.begin()->shape();
  for (const std::int64_t size : inner) shape_.push_back(size);
  for (const NestedValues& part : parts) {
    require(
        part.shape() == inner,
        "Tensor::from: braces at one level must hold as many numbers each, got shapes {} and {}",
        inner, part.shape());
    values_.insert(values_.end(), part.values().begin(), part.values().end());
  }
}

}  // namespace tessera
