#pragma once

#include <cstdint>
#include <string>

#include "core/base/dtype.h"

namespace tessera::io {

/// Bytes of a file that are known before any tensor is read.
struct Literal {
  std::int64_t offset = 0;  ///< of the first, from the start of the file
  std::string bytes;
};

/// Order of a tensor's elements in a file: with its elements seen as [n, rows, columns, inner], the
/// file holds [n, columns, rows, inner].
struct Swap {
  std::int64_t rows = 0, columns = 0, inner = 0;
};

/// Representation of elements in a file.
enum class Encoding : std::uint8_t {
  Plain,  ///< as the dtype
  Q8_0,   ///< blocks of 32 elements: a scale in f16, and 32 integers in i8 to multiply it with
};

inline constexpr std::int64_t kQ8Elements = 32, kQ8Bytes = 34;  ///< of a Q8_0 block

/// Indivisible unit of an encoding.
struct EncodingUnit {
  std::int64_t elements = 1, bytes = 0;
};
constexpr EncodingUnit encoding_unit(Encoding encoding, DType dtype) {
  return encoding == Encoding::Q8_0 ? EncodingUnit{kQ8Elements, kQ8Bytes}
                                    : EncodingUnit{1, static_cast<std::int64_t>(dtype_size(dtype))};
}

/// Encodes n elements, a multiple of 32. Scales are the largest magnitude of a block over 127;
/// rounds halves away from zero.
/// @return whether all scales are finite in f16; if not, `out` is undefined
bool encode_q8_0(const float* values, std::int64_t n, char* out);
/// Decodes n elements, a multiple of 32. The product of scale and integer is exact.
void decode_q8_0(const char* blocks, std::int64_t n, float* out);

}  // namespace tessera::io
