#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "tests/support/fiber/fiber.h"

// Warp-wide matrix products and operand loads. Fragment layouts: PTX ISA, "Matrix Fragments for
// mma.m16n8k16 with floating point type" and "Warp-level matrix load instruction: ldmatrix".
namespace tessera::fiber {

inline float bf16_value(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

/// Element i of a lane's packed bf16 registers.
inline float bf16_of(const std::uint32_t* registers, int i) {
  return bf16_value(registers[i / 2] >> (16 * (i % 2)) & 0xffffU);
}

/// d = a b + c in f32, for a [16, 16] row-major and b [16, 8] column-major, both bf16. d replaces
/// c.
inline void mma_m16n8k16_bf16(float* c, const std::uint32_t* a, const std::uint32_t* b,
                              const char* file, int line) {
  struct Operands {
    const std::uint32_t *a, *b;
    float* c;
  } own{a, b, c};
  const auto lanes = gather(0xffffffffU, reinterpret_cast<std::uintptr_t>(&own), file,
                            line);  // copied: see gather()
  if (lane() == 0) {
    float a_matrix[16][16], b_matrix[16][8];
    for (int l = 0; l < kWarp; ++l) {
      const auto& of = *reinterpret_cast<const Operands*>(lanes[static_cast<std::size_t>(l)]);
      const int group = l >> 2, in_group = l % 4;
      for (int i = 0; i < 8; ++i) {
        const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
        const int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
        a_matrix[row][column] = bf16_of(of.a, i);
      }
      for (int i = 0; i < 4; ++i) {
        const int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
        b_matrix[row][group] = bf16_of(of.b, i);
      }
    }
    for (int l = 0; l < kWarp; ++l) {
      const auto& of = *reinterpret_cast<const Operands*>(lanes[static_cast<std::size_t>(l)]);
      for (int i = 0; i < 4; ++i) {
        const int row = i < 2 ? l >> 2 : (l >> 2) + 8, column = l % 4 * 2 + (i & 1);
        float sum = of.c[i];
        for (int k = 0; k < 16; ++k) sum += a_matrix[row][k] * b_matrix[k][column];
        of.c[i] = sum;
      }
    }
  }
  gather(0xffffffffU, 0, file, line);  // waits for lane 0
}

/// ldmatrix.m8n8.x4: lanes 8 i to 8 i + 7 pass in `row` the addresses of the 8 rows, 16 bytes each,
/// of matrix i. Register i receives elements 2 (lane % 4) and the next of row lane / 4 of matrix i,
/// or of column lane / 4 if transposed.
inline void ldmatrix_x4(std::uint32_t* to, const void* row, bool transposed, const char* file,
                        int line) {
  const auto rows = gather(0xffffffffU, reinterpret_cast<std::uintptr_t>(row), file, line);
  const int own = lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::uint32_t packed = 0;
    for (int i = 0; i < 2; ++i) {
      const int major = transposed ? own % 4 * 2 + i : own / 4;
      const int minor = transposed ? own / 4 : own % 4 * 2 + i;
      const auto* at =
          reinterpret_cast<const std::byte*>(rows[static_cast<std::size_t>(matrix * 8 + major)]) +
          std::ptrdiff_t{minor} * 2;
      check_read(at, 2);
      std::uint16_t bits = 0;
      std::memcpy(&bits, at, 2);
      packed |= std::uint32_t{bits} << (16 * i);
    }
    to[matrix] = packed;
  }
}

}  // namespace tessera::fiber
