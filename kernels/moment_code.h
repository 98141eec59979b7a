#pragma once

#include <cstdint>

// AdamW's moments in 8 bits: blocks of 64 elements share a scale, the largest magnitude in them. Codes
// are powers of evenly spaced numbers, since small values matter as much as large ones. Rounding is
// stochastic, so that small changes count on average.
namespace tessera::kernels {

inline constexpr std::int64_t kMomentBlock = 64;

/// Scale of a block, and its reciprocal, for a largest magnitude. Both are 0 if the reciprocal would not be
/// a number: the block's moments become 0.
constexpr float moment_scale(float most) { return most < 1.1754944e-38F ? 0.0F : most; }
constexpr float moment_part(float most) { return most < 1.1754944e-38F ? 0.0F : 1.0F / most; }

/// Code -127 to 127 of a first moment, as a part of the block's scale: +-(code / 127)^2.
constexpr float decode_first(int code) {
  const float root = static_cast<float>(code) * (1.0F / 127.0F);
  return root < 0 ? -root * root : root * root;
}
/// @param x       in [-1, 1]
/// @param root    sqrt(|x|)
/// @param random  in [0, 1)
constexpr int encode_first(float x, float root, float random) {
  int code = static_cast<int>(root * 127.0F);
  code = code > 126 ? 126 : code;
  const float below = decode_first(code), above = decode_first(code + 1);
  const float magnitude = x < 0 ? -x : x;
  code += magnitude - below > random * (above - below) ? 1 : 0;
  return x < 0 ? -code : code;
}

/// Code 0 to 255 of a second moment: (code / 255)^4.
constexpr float decode_second(int code) {
  const float root = static_cast<float>(code) * (1.0F / 255.0F);
  return root * root * root * root;
}
/// Never 0 for a value above 0, because updates are divided by its root.
/// @param x     in [0, 1]
/// @param root  its fourth root
constexpr int encode_second(float x, float root, float random) {
  int code = static_cast<int>(root * 255.0F);
  code = code > 254 ? 254 : code;
  const float below = decode_second(code), above = decode_second(code + 1);
  code += x - below > random * (above - below) ? 1 : 0;
  return x > 0 && code == 0 ? 1 : code;
}

/// 32 random bits for an element; a bijection that mixes well (hash prospector's lowbias32).
constexpr std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352dU;
  x = (x ^ x >> 15) * 0x846ca68bU;
  return x ^ x >> 16;
}
/// Key of a step's random bits for a parameter.
constexpr std::uint32_t moment_key(std::uint64_t place, std::int64_t step) {
  const std::uint32_t lower = mixed(static_cast<std::uint32_t>(place));
  const std::uint32_t both = mixed(lower ^ static_cast<std::uint32_t>(place >> 32));
  return mixed(both ^ static_cast<std::uint32_t>(step));
}
/// Two numbers in [0, 1) from the bits of an element.
constexpr float first_random(std::uint32_t bits) {
  return static_cast<float>(static_cast<int>(bits & 0xffffU)) * (1.0F / 65536.0F);
}
constexpr float second_random(std::uint32_t bits) {
  return static_cast<float>(static_cast<int>(bits >> 16)) * (1.0F / 65536.0F);
}

}  // namespace tessera::kernels
