#pragma once

#include "kernels/cpu/few_rows.h"
#include "kernels/cpu/product.h"
#include "kernels/workspace.h"

// Matrix products by few_rows.h, in parts of b's rows or columns.
TESSERA_CPU_BEGIN

inline Index few_rows_slices(bool transposed_b) { return transposed_b ? 1 : kSlices; }

/// Elements of scratch memory for products with up to m rows.
template <typename T>
Index few_rows_elements(Index m, Index n, Index k, bool transposed_b) {
  const Index widened = std::is_same_v<T, BFloat16> ? k : 0;
  return std::min(m, kFewRows) * (widened + few_rows_slices(transposed_b) * n);
}

/// Whether few_rows.h multiplies a product of bf16, or of f32 faster than Eigen: the weights exceed
/// a core's caches, and the sums are short beside them.
template <typename T, typename C>
bool has_few_rows(const Product<T, C>& p) {
  if (p.m > kFewRows || p.a.transposed) return false;
  return std::is_same_v<T, BFloat16> ||
         (p.n * p.k >= (1 << 18) && p.n >= 64 && p.k >= 32 * std::max<Index>(p.m, 4));
}

/// @return false if the product does not have few rows: nothing was computed
template <typename T, typename C>
bool multiplied_few_rows(Context& context, const Product<T, C>& p, float* scratch) {
  if (!has_few_rows(p)) return false;
  const Index slices = few_rows_slices(p.b.transposed);
  float* const sums = scratch;
  const float* a;
  Index a_stride = p.a.stride;
  if constexpr (std::is_same_v<T, BFloat16>) {
    float* const wide = sums + slices * p.m * p.n;
    for (Index i = 0; i < p.m; ++i)
      for (Index j = 0; j < p.k; ++j) wide[i * p.k + j] = load(p.a.data + i * p.a.stride + j);
    a = wide;
    a_stride = p.k;
  } else {
    a = p.a.data;
  }

  // Whole rows of b for up to kSlices threads.
  const bool serial = p.m * p.n * p.k < (1 << 18);
  const Index threads = serial ? 1 : context.threads().size();
  const Index most =
      p.b.transposed ? ThreadPool::kChunksPerThread * threads : (threads + slices - 1) / slices;
  const Index parts = std::min(most, (p.n + kCut - 1) / kCut);
  const Index width = (p.n + parts - 1) / parts;
  context.threads().parallel_for(
      slices * parts, serial ? slices * parts : 1, [&](Index begin, Index end) {
        for (Index item = begin; item < end; ++item) {
          const Index slice = item / parts, column = item % parts * width;
          const Index columns = std::min(width, p.n - column);
          if (columns <= 0) continue;
          const Index first = slice * p.k / slices, last = (slice + 1) * p.k / slices;
          const FewRows<T> rows{sums + slice * p.m * p.n + column,
                                p.n,
                                a + first,
                                a_stride,
                                p.b.at(first, column).data,
                                p.b.stride,
                                p.m,
                                columns,
                                last - first};
          if (p.b.transposed) {
            few_dots(rows);
            continue;
          }
          for (Index i = 0; i < p.m; ++i) std::fill_n(rows.sums + i * p.n, columns, 0.0F);
          add_few_rows(rows);
        }
      });
  context.threads().parallel_for(p.n, (1 << 14) / p.m, [&](Index begin, Index end) {
    for (Index i = 0; i < p.m; ++i) {
      C* const c = p.c + i * p.c_stride;
      const C* const addend = p.addend == nullptr ? nullptr : p.addend + i * p.addend_stride;
      const float* const from = sums + i * p.n;
#pragma omp simd
      for (Index j = begin; j < end; ++j) {
        float sum = from[j];
        for (Index slice = 1; slice < slices; ++slice) sum += from[slice * p.m * p.n + j];
        if (p.bias != nullptr) sum += load(p.bias + j);
        store(c + j, addend != nullptr ? sum + load(addend + j) : sum);
      }
    }
    finish(p, {0, begin, p.m, end - begin});
  });
  return true;
}
template <typename T, typename C>
bool multiplied_few_rows(Context& context, const Product<T, C>& p) {
  if (!has_few_rows(p)) return false;
  const Index elements = few_rows_elements<T>(p.m, p.n, p.k, p.b.transposed);
  const Workspace workspace(context, static_cast<std::size_t>(elements) * sizeof(float), "matmul");
  return workspace.is_planned() ||
         multiplied_few_rows(context, p, static_cast<float*>(workspace.data()));
}

TESSERA_CPU_END
