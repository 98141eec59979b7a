#include "io/base/convert.h"

#include <bit>
#include <cstring>

namespace tessera::io {
namespace {

// Branch-free, so that convert_loop is vectorized.
struct ToF32 {
  using To = float;
  [[gnu::always_inline]] static float convert(float value) { return value; }
  [[gnu::always_inline]] static float convert(double value) { return static_cast<float>(value); }
  [[gnu::always_inline]] static float convert(BFloat16 value) { return static_cast<float>(value); }
  [[gnu::always_inline]] static float convert(std::uint16_t f16) {
    const std::uint32_t sign = std::uint32_t{f16 & 0x8000U} << 16;
    const std::uint32_t exponent = (f16 >> 10) & 0x1fU;
    const std::uint32_t fraction = f16 & 0x3ffU;
    const std::uint32_t is_small = 0U - static_cast<std::uint32_t>(exponent == 0);
    const std::uint32_t is_special = 0U - static_cast<std::uint32_t>(exponent == 0x1f);
    // Zero and subnormals are fraction * 2^-24, which f32 represents exactly.
    const float small = static_cast<float>(static_cast<std::int32_t>(fraction)) * 0x1.0p-24F;
    const std::uint32_t normal = (exponent + 112 + (is_special & 112)) << 23 | fraction << 13;
    const std::uint32_t bits =
        (std::bit_cast<std::uint32_t>(small) & is_small) | (normal & ~is_small);
    return std::bit_cast<float>(sign | bits);
  }
};

// Rounding to nearest twice (to f32, then to a narrower type) is wrong next to ties. The first step
// therefore rounds to odd: towards zero, with the last bit set if inexact.
[[gnu::always_inline]] inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  const double magnitude = value < 0 ? -value : value;
  const double back_magnitude = back < 0 ? -back : back;
  bits -= back_magnitude > magnitude ? 1U : 0U;
  bits |= back_magnitude != magnitude && value == value ? 1U : 0U;
  return std::bit_cast<float>(bits);
}

struct ToBF16 {
  using To = BFloat16;
  template <typename From>
  [[gnu::always_inline]] static BFloat16 convert(From value) {
    return BFloat16(ToF32::convert(value));
  }
  [[gnu::always_inline]] static BFloat16 convert(double value) {
    return BFloat16(round_to_odd(value));
  }
};

struct ToF16 {
  using To = std::uint16_t;
  template <typename From>
  [[gnu::always_inline]] static std::uint16_t convert(From value) {
    return narrow(ToF32::convert(value));
  }
  [[gnu::always_inline]] static std::uint16_t convert(double value) {
    return narrow(round_to_odd(value));
  }

 private:
  [[gnu::always_inline]] static std::uint16_t narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffffffU;
    const auto mask = [](bool is) { return 0U - static_cast<std::uint32_t>(is); };
    const std::uint32_t is_small = mask(magnitude < 0x38800000U);   // below 2^-14
    const std::uint32_t is_large = mask(magnitude >= 0x47800000U);  // from 65536 on
    const std::uint32_t is_nan = mask(magnitude > 0x7f800000U);
    // The last bit of a sum with 0.5 is 2^-24, as that of a subnormal f16.
    const float sum = std::bit_cast<float>(magnitude & is_small) + 0.5F;
    const std::uint32_t small = std::bit_cast<std::uint32_t>(sum) - 0x3f000000U;
    const std::uint32_t normal =
        (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
    const std::uint32_t large = 0x7c00U | (is_nan & (0x200U | ((magnitude >> 13) & 0x3ffU)));
    const std::uint32_t result =
        (small & is_small) | (large & is_large) | (normal & ~is_small & ~is_large);
    return static_cast<std::uint16_t>(((bits >> 16) & 0x8000U) | result);
  }
};

template <typename Convert, typename From>
[[gnu::always_inline]] inline void convert_loop(const char* in, char* out, std::int64_t n) {
  using To = typename Convert::To;
  for (std::int64_t i = 0; i < n; ++i) {
    From value;
    std::memcpy(&value, in + i * static_cast<std::int64_t>(sizeof(From)), sizeof(From));
    const To converted = Convert::convert(value);
    std::memcpy(out + i * static_cast<std::int64_t>(sizeof(To)), &converted, sizeof(To));
  }
}

#if defined(__x86_64__)
template <typename Convert, typename From>
[[gnu::target("avx2")]] void convert_avx2(const char* in, char* out, std::int64_t n) {
  convert_loop<Convert, From>(in, out, n);
}
#endif

template <typename Convert, typename From>
void convert_from(const char* in, char* out, std::int64_t n) {
#if defined(__x86_64__)
  static const bool kHasAvx2 = __builtin_cpu_supports("avx2");
  if (kHasAvx2) return convert_avx2<Convert, From>(in, out, n);
#endif
  convert_loop<Convert, From>(in, out, n);
}

template <typename Convert>
void convert_to(DType from, const char* in, char* out, std::int64_t n) {
  switch (from) {
    case DType::F64:
      return convert_from<Convert, double>(in, out, n);
    case DType::F32:
      return convert_from<Convert, float>(in, out, n);
    case DType::BF16:
      return convert_from<Convert, BFloat16>(in, out, n);
    default:
      return convert_from<Convert, std::uint16_t>(in, out, n);
  }
}

}  // namespace

bool can_convert(DType from, DType to) {
  return from == to || (is_floating(from) && to != DType::F64 && is_floating(to));
}

void convert_elements(DType from, const void* source, DType to, void* out, std::int64_t n) {
  require<Unsupported>(
      can_convert(from, to),
      "cannot convert {} to {}; f64, f32, bf16 and f16 convert to f32, bf16 and f16", from, to);
  const auto* in = static_cast<const char*>(source);
  auto* target = static_cast<char*>(out);
  if (from == to) {
    if (n > 0) std::memcpy(target, in, static_cast<std::size_t>(n) * dtype_size(from));
  } else if (to == DType::F32) {
    convert_to<ToF32>(from, in, target, n);
  } else if (to == DType::BF16) {
    convert_to<ToBF16>(from, in, target, n);
  } else {
    convert_to<ToF16>(from, in, target, n);
  }
}

}  // namespace tessera::io
