#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/base/error.h"

namespace tessera {

/// Up to eight sizes or strides, in elements, held inline. Value type.
class Dims {
 public:
  static constexpr int kMaxDims = 8;

  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values);
  /// @throws InvalidArgument on more than kMaxDims values
  Dims(const std::int64_t* values, std::size_t count);
  explicit Dims(const std::vector<std::int64_t>& values) : Dims(values.data(), values.size()) {}

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::int64_t& operator[](int i) { return values_[static_cast<std::size_t>(i)]; }
  std::int64_t operator[](int i) const { return values_[static_cast<std::size_t>(i)]; }
  /// i may be negative: -1 is the last. @throws InvalidArgument if out of range
  std::int64_t at(int i) const;
  std::int64_t back() const { return at(-1); }
  void push_back(std::int64_t value);

  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  friend bool operator==(const Dims& a, const Dims& b);

  /// "[4, 24, 48]"
  std::string str() const;

 private:
  std::array<std::int64_t, kMaxDims> values_{};
  int size_ = 0;
};

using Shape = Dims;
using Strides = Dims;

/// Product of the sizes; 1 for no dims. @throws InvalidArgument if negative or over 2^63 - 1
std::int64_t numel(const Shape& shape);

/// Row-major strides of a dense tensor.
Strides contiguous_strides(const Shape& shape);

}  // namespace tessera

template <>
struct fmt::formatter<tessera::Dims> : fmt::formatter<std::string> {
  fmt::format_context::iterator format(const tessera::Dims& dims, fmt::format_context& ctx) const;
};
