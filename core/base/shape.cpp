#include "core/base/shape.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace tessera {

Dims::Dims(const std::int64_t* values, std::size_t count) : size_(static_cast<int>(count)) {
  require(count <= kMaxDims, "a tensor has at most {} dims, got {}", int{kMaxDims}, count);
  std::copy_n(values, count, values_.begin());
}

Dims::Dims(std::initializer_list<std::int64_t> values) : Dims(values.begin(), values.size()) {}

std::int64_t Dims::at(int i) const {
  const int index = i < 0 ? i + size_ : i;
  require(index >= 0 && index < size_, "dim {} is out of range for {}", i, str());
  return values_[static_cast<std::size_t>(index)];
}

void Dims::push_back(std::int64_t value) {
  require(size_ < kMaxDims, "a tensor has at most {} dims", int{kMaxDims});
  values_[static_cast<std::size_t>(size_++)] = value;
}

bool operator==(const Dims& a, const Dims& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

std::string Dims::str() const { return fmt::format("[{}]", fmt::join(begin(), end(), ", ")); }

std::int64_t numel(const Shape& shape) {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    require(size >= 0, "shape {} has a negative dim", shape);
    require(!__builtin_mul_overflow(product, size, &product),
            "shape {} has more than 2^63 - 1 elements", shape);
  }
  return product;
}

Strides contiguous_strides(const Shape& shape) {
  Strides strides = shape;
  std::int64_t stride = 1;
  for (int i = shape.size() - 1; i >= 0; --i) {
    strides[i] = stride;
    // Only shapes with a zero dim can overflow here.
    require(!__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[i], 1), &stride),
            "strides of shape {} are over 2^63 - 1", shape);
  }
  return strides;
}

}  // namespace tessera

fmt::format_context::iterator fmt::formatter<tessera::Dims>::format(
    const tessera::Dims& dims, fmt::format_context& ctx) const {
  return fmt::formatter<std::string>::format(dims.str(), ctx);
}
