#include "io/base/convert.h"

#include <bit>
#include <cstring>

namespace tessera::io {
namespace {

template <typename T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

float load_f32(const char* at) { return load<float>(at); }
float load_bf16(const char* at) { return static_cast<float>(load<BFloat16>(at)); }
float load_f16(const char* at) { return float_from_f16(load<std::uint16_t>(at)); }

template <typename Load>
void convert_with(Load load_one, std::size_t step, const char* in, DType to, char* out,
                  std::int64_t n) {
  if (to == DType::F32) {
    for (std::int64_t i = 0; i < n; ++i, in += step, out += sizeof(float)) {
      const float value = load_one(in);
      std::memcpy(out, &value, sizeof(value));
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i, in += step, out += sizeof(BFloat16)) {
      const BFloat16 value(load_one(in));
      std::memcpy(out, &value, sizeof(value));
    }
  }
}

}  // namespace

bool can_convert(DType from, DType to) {
  const bool readable = from == DType::F32 || from == DType::BF16 || from == DType::F16;
  return from == to || (readable && (to == DType::F32 || to == DType::BF16));
}

void convert_elements(DType from, const void* source, DType to, void* out, std::int64_t n) {
  require<Unsupported>(can_convert(from, to),
                       "cannot convert {} to {}; f32, bf16 and f16 convert to f32 and bf16", from,
                       to);
  const auto* in = static_cast<const char*>(source);
  auto* target = static_cast<char*>(out);
  if (from == to) {
    if (n > 0) std::memcpy(target, in, static_cast<std::size_t>(n) * dtype_size(from));
  } else if (from == DType::F32) {
    convert_with(load_f32, 4, in, to, target, n);
  } else if (from == DType::BF16) {
    convert_with(load_bf16, 2, in, to, target, n);
  } else {
    convert_with(load_f16, 2, in, to, target, n);
  }
}

float float_from_f16(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fU;
  const std::uint32_t fraction = bits & 0x3ffU;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000U | fraction << 13);
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exact in binary32
    const float value = static_cast<float>(fraction) * 0x1.0p-24F;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

}  // namespace tessera::io
