#include "io/pump/layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "io/base/convert.h"

namespace tessera::io {

bool encode_q8_0(const float* values, std::int64_t n, char* out) {
  bool finite = true;
  for (std::int64_t at = 0; at < n; at += kQ8Elements, values += kQ8Elements, out += kQ8Bytes) {
    float largest = 0;
    for (int i = 0; i < kQ8Elements; ++i) {
      finite = finite && std::isfinite(values[i]);
      largest = std::max(largest, std::abs(values[i]));
    }
    const float scale = largest / 127;
    const float inverse = scale != 0 ? 1 / scale : 0;
    convert_elements(DType::F32, &scale, DType::F16, out, 1);
    std::uint16_t bits = 0;
    std::memcpy(&bits, out, sizeof(bits));
    finite = finite && bits < 0x7c00;
    if (!finite) return false;
    for (int i = 0; i < kQ8Elements; ++i) {
      const float value = values[i] * inverse;
      const int whole = static_cast<int>(value);
      const float rest = value - static_cast<float>(whole);
      out[2 + i] = static_cast<char>(whole + (rest >= 0.5F ? 1 : 0) - (rest <= -0.5F ? 1 : 0));
    }
  }
  return true;
}

void decode_q8_0(const char* blocks, std::int64_t n, float* out) {
  for (std::int64_t at = 0; at < n; at += kQ8Elements, blocks += kQ8Bytes) {
    float scale = 0;
    convert_elements(DType::F16, blocks, DType::F32, &scale, 1);
    for (int i = 0; i < kQ8Elements; ++i)
      out[at + i] = scale * static_cast<float>(static_cast<std::int8_t>(blocks[2 + i]));
  }
}

}  // namespace tessera::io
