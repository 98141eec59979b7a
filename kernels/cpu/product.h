#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/base/context.h"
#include "core/base/thread_pool.h"
#include "kernels/cpu/gelu.h"
#include "kernels/cpu/level.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/matmul.h"

// A matrix product with what is added to it, and the parts that threads compute.
TESSERA_CPU_BEGIN

using Index = std::int64_t;
inline constexpr Index kCut = 48;  // columns or rows; a multiple of Eigen's register tiles

/// A row-major matrix [rows, columns], or the transpose of one.
template <typename T>
struct Operand {
  const T* data;
  Index stride;
  bool transposed;
  /// Block that starts at (row, column) of the matrix after transposition.
  Operand at(Index row, Index column) const {
    return {transposed ? data + column * stride + row : data + row * stride + column, stride,
            transposed};
  }
};

struct Part {
  Index row, column, rows, columns;
};

/// A matrix cut along one side.
struct Parts {
  bool by_columns;
  Index m, n, cut, pieces, count;
  Parts(Index rows, Index columns, Index most, bool columns_are_cut, Index multiple = kCut)
      : by_columns(columns_are_cut),
        m(rows),
        n(columns),
        cut(multiple),
        pieces((length() + cut - 1) / cut),
        count(std::min(most, pieces)) {}
  Part operator[](Index i) const {
    const Index first = i * pieces / count * cut;
    const Index size = std::min(length(), (i + 1) * pieces / count * cut) - first;
    return by_columns ? Part{0, first, m, size} : Part{first, 0, size, n};
  }

 private:
  Index length() const { return by_columns ? n : m; }
};

/// c = op(a) op(b) [+ bias] [+ addend], where addend may be c
template <typename T, typename C>
struct Product {
  Operand<T> a, b;
  C* c;
  Index c_stride, m, n, k;
  const T* bias;
  const C* addend;
  Index addend_stride;
  Epilogue epilogue = Epilogue::None;  // with it, c and the next are [m, n], contiguous
  C* gelu_result = nullptr;            // Gelu: written; c is its input and may be the same
  const C* gelu_input = nullptr;       // GeluGradient

  /// One part per thread, because a library packs all of one operand anew for each part.
  Parts parts(Context& context) const {
    const bool serial = m * n * k < (1 << 18);
    return {m, n, serial ? 1 : context.threads().size(), n >= m};
  }
};

/// Whether the bias is in what the product is added to; in bf16 it is added with the product.
template <typename T>
inline constexpr bool kStartsWithBias = !std::is_same_v<T, BFloat16>;

/// Whether the product is added to what start() writes.
template <typename T, typename C>
bool is_added(const Product<T, C>& p) {
  return p.addend != nullptr || (kStartsWithBias<T> && p.bias != nullptr);
}

/// Writes into a part of c what the product is added to: addend, bias, both, or zeros.
template <typename T, typename C>
void start(const Product<T, C>& p, const Part& part) {
  for (Index row = part.row; row < part.row + part.rows; ++row) {
    C* const line = p.c + row * p.c_stride + part.column;
    const bool copies = p.addend != nullptr && p.addend != p.c;
    if (copies) std::copy_n(p.addend + row * p.addend_stride + part.column, part.columns, line);
    if (!is_added(p)) std::fill_n(line, part.columns, C{});
    if constexpr (kStartsWithBias<T>) {
      if (p.bias == nullptr) continue;
      const T* const bias = p.bias + part.column;
      const bool adds = p.addend != nullptr;
#pragma omp simd
      for (Index j = 0; j < part.columns; ++j) line[j] = adds ? line[j] + bias[j] : bias[j];
    }
  }
}

/// Runs the epilogue on a part of c.
template <typename T, typename C>
void finish(const Product<T, C>& p, const Part& part) {
  if (p.epilogue == Epilogue::None) return;
  for (Index row = part.row; row < part.row + part.rows; ++row) {
    const Index at = row * p.n + part.column;
    if (p.epilogue == Epilogue::Gelu)
      gelu(p.c + at, p.gelu_result + at, part.columns);
    else
      gelu_gradient<false>(p.gelu_input + at, p.c + at, p.c + at, part.columns);
  }
}

TESSERA_CPU_END
