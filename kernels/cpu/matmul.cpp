#include "kernels/matmul.h"

#include <Eigen/Core>
#include <algorithm>

#include "core/base/thread_pool.h"
#include "kernels/cpu/few_rows_product.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/vector.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/grouped_matmul.h"
#include "kernels/product_library.h"
#include "kernels/workspace.h"

// With few rows, few_rows_product.h multiplies f32 and bf16 matrices. Else oneDNN or Eigen
// multiplies f32 matrices (product_library.h). Eigen's templates dominate the compile time of this
// file, so only c += op(a) op(b) is instantiated, and f64, which only gradient checks use, has
// plain loops. oneDNN multiplies bf16 matrices on processors that have instructions for them;
// elsewhere bf16 operands are widened to f32 panels.
// Threads compute equal parts of the longer side of c (of contiguous bf16 matrices with many rows:
// of its rows), cut at fixed multiples, so that results repeat for a given number of threads.
// Buffers of the libraries (per thread below 32 MiB, with Eigen 4 MiB) are not in the memory ledger.
TESSERA_CPU_BEGIN
namespace {

constexpr Index kRowsForLibrary = 96;  // of f32: Eigen multiplies fewer rows faster
// The AMX kernel of oneDNN 2.6 takes contiguous bf16 matrices only, and is slow if no multiple of 64
// divides the rows (docs/cpu-performance.md). With AVX512-BF16 alone, blocks of rows are faster, too, but a transposed a
// is not copied.
constexpr Index kDenseCut = 64;
constexpr Index kDenseRows = 256;       // per thread; each thread packs all of b
constexpr Index kMostCopied = 1 << 24;  // elements of a
constexpr Index kPanelColumns = 2048;   // columns of b and c per panel, for bf16
// Float32 products by oneDNN 2.6 with panels of b that are copied first, see copies_b().
constexpr Index kCopiedColumns = 96, kCopiedDepth = 768;
constexpr Index kLeastTermsOfCopies = 256;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>>;
using Out = Eigen::Map<RowMajor, 0, Eigen::OuterStride<>>;

/// c += op(a) op(b)
void add_product(const Operand<float>& a, const Operand<float>& b, float* c, Index c_stride,
                 Index m, Index n, Index k) {
  Out out(c, m, n, Eigen::OuterStride<>(c_stride));
  const Eigen::OuterStride<> a_stride(a.stride);
  const Eigen::OuterStride<> b_stride(b.stride);
  if (a.transposed && b.transposed)
    out.noalias() +=
        In(a.data, k, m, a_stride).transpose() * In(b.data, n, k, b_stride).transpose();
  else if (a.transposed)
    out.noalias() += In(a.data, k, m, a_stride).transpose() * In(b.data, k, n, b_stride);
  else if (b.transposed)
    out.noalias() += In(a.data, m, k, a_stride) * In(b.data, n, k, b_stride).transpose();
  else
    out.noalias() += In(a.data, m, k, a_stride) * In(b.data, k, n, b_stride);
}
void add_product(const Operand<double>& a, const Operand<double>& b, double* c, Index c_stride,
                 Index m, Index n, Index k) {
  for (Index i = 0; i < m; ++i) {
    double* const row = c + i * c_stride;
    for (Index p = 0; p < k; ++p) {
      const double factor = *a.at(i, p).data;
      const double* const from = b.at(p, 0).data;
      const Index step = b.transposed ? b.stride : 1;
#pragma omp simd
      for (Index j = 0; j < n; ++j) row[j] += factor * from[j * step];
    }
  }
}

/// Whether b, and blocks of rows of c and of an untransposed a, are contiguous.
template <typename T, typename C>
bool is_dense(const Product<T, C>& p) {
  return p.b.stride == (p.b.transposed ? p.k : p.n) && p.c_stride == p.n &&
         (p.a.transposed || p.a.stride == p.k);
}

template <typename T, typename C>
LibraryProduct::Form form_of(const Product<T, C>& p, const Part& part, bool copied_a) {
  constexpr auto kDType = [](auto value) {
    return std::is_same_v<decltype(value), BFloat16> ? DType::BF16 : DType::F32;
  };
  return {.operands = kDType(T{}),
          .result = kDType(C{}),
          .transpose_a = p.a.transposed,
          .transpose_b = p.b.transposed,
          .has_bias = p.bias != nullptr && !kStartsWithBias<T>,
          .accumulate = is_added(p),
          .m = part.rows,
          .n = part.columns,
          .k = p.k,
          .a_stride = copied_a ? part.rows : p.a.stride,
          .b_stride = p.b.stride,
          .c_stride = p.c_stride};
}

/// @param multiply  multiply(i, part) computes what is between start() and finish()
template <typename T, typename C, typename Multiply>
void for_parts(Context& context, const Product<T, C>& p, const Parts& parts,
               const Multiply& multiply) {
  context.threads().parallel_for(parts.count, 1, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      const Part part = parts[i];
      if (is_added(p)) start(p, part);
      multiply(i, part);
      finish(p, part);
    }
  });
}

/// @param copied_a  [k, m] for the columns of each part of a transposed a; null: not copied
template <typename T, typename C>
void multiply_parts(Context& context, const Product<T, C>& p, const Parts& parts, T* copied_a) {
  for_parts(context, p, parts, [&](Index, const Part& part) {
    const T* a = p.a.at(part.row, 0).data;
    if (copied_a != nullptr) {
      T* const to = copied_a + part.row * p.k;
      for (Index row = 0; row < p.k; ++row)
        std::copy_n(a + row * p.a.stride, part.rows, to + row * part.rows);
      a = to;
    }
    const LibraryProduct::Form form = form_of(p, part, copied_a != nullptr);
    multiply_by_library({.form = form,
                         .a = a,
                         .b = p.b.at(0, part.column).data,
                         .bias = form.has_bias ? p.bias + part.column : nullptr,
                         .c = p.c + part.row * p.c_stride + part.column});
  });
}

/// Whether oneDNN 2.6 is faster if panels of b are copied first, contiguous and not transposed:
/// - b is transposed. oneDNN packs it slowly; products take up to 12% less time, with odd k more.
/// - Rows of b lie at multiples of a page, so that they share few sets of the cache, and c has few rows, for which
///   oneDNN does not pack b. Up to half the time with AVX2, 8% less with AVX-512.
/// With more rows oneDNN packs a for each panel too often.
/// @param rows  of a part
bool copies_b(const Product<float, float>& p, Index rows) {
  constexpr Index kStride = kLanes<float> == 16 ? 1024 : 512;
  if (p.n < kCut || p.k < kLeastTermsOfCopies) return false;
  return p.b.transposed ? rows <= 1024 : rows <= 512 && p.b.stride % kStride == 0;
}

/// The same as multiply_parts() with copies of panels of b.
/// @param copies  [parts.count, kCopiedDepth, kCopiedColumns]
void multiply_copies(Context& context, const Product<float, float>& p, const Parts& parts,
                     float* copies) {
  for_parts(context, p, parts, [&](Index i, Part part) {
    float* const copy = copies + i * kCopiedDepth * kCopiedColumns;
    const Index last = part.column + part.columns;
    for (; part.column < last; part.column += kCopiedColumns) {
      part.columns = std::min(kCopiedColumns, last - part.column);
      for (Index k = 0; k < p.k; k += kCopiedDepth) {
        Product<float, float> slice = p;
        slice.k = std::min(kCopiedDepth, p.k - k);
        slice.b = {copy, kCopiedColumns, false};
        if (k > 0) slice.addend = p.c;
        const Operand<float> b = p.b.at(k, part.column);
        for (Index row = 0; !b.transposed && row < slice.k; ++row)
          std::copy_n(b.data + row * b.stride, part.columns, copy + row * kCopiedColumns);
        for (Index j = 0; b.transposed && j < part.columns; j += kLanes<float>)
          copy_transposed<kLanes<float>>(copy + j, kCopiedColumns, b.data + j * b.stride, b.stride,
                                         part.columns - j, slice.k, 1.0F);
        multiply_by_library({.form = form_of(slice, part, false),
                             .a = p.a.at(part.row, k).data,
                             .b = copy,
                             .bias = nullptr,
                             .c = p.c + part.row * p.c_stride + part.column});
      }
    }
  });
}

/// @param may_copy  whether operands may be copied into memory that a plan must know; the rows of
///                  groups are not known to it
/// @return false if the library doesn't support the product: nothing was computed
template <typename T, typename C>
bool multiplied_by_library(Context& context, const Product<T, C>& p, bool may_copy) {
  const ProductLibrary& library = product_library();
  if (library.supports == nullptr || p.k == 0) return false;
  if (std::is_same_v<T, BFloat16> && !library.has_bf16) return false;
  // Smaller parts take less scratch memory.
  const auto supported = [&](Parts& parts, bool copied_a) {
    const Index most = std::min(parts.pieces, 8 * parts.count);
    for (;; parts.count *= 2) {
      bool all = true;
      for (Index i = 0; all && i < parts.count; ++i)
        all = library.supports(form_of(p, parts[i], copied_a));
      if (all || 2 * parts.count > most) return all;
    }
  };
  Parts parts = p.parts(context);
  if (std::is_same_v<T, BFloat16> && parts.count > 1 && p.m >= kDenseRows * parts.count &&
      is_dense(p) &&
      (!p.a.transposed || (library.has_amx && may_copy && p.m * p.k <= kMostCopied))) {
    Parts rows(p.m, p.n, parts.count, false, kDenseCut);
    if (supported(rows, p.a.transposed)) {
      if (!p.a.transposed) {
        if (p.c != nullptr) multiply_parts<T, C>(context, p, rows, nullptr);
        return true;
      }
      const Workspace copy(context, static_cast<std::size_t>(p.m * p.k) * sizeof(T), "matmul");
      if (!copy.is_planned()) multiply_parts(context, p, rows, static_cast<T*>(copy.data()));
      return true;
    }
  }
  if (std::is_same_v<T, float>) {
    if (p.m < kRowsForLibrary) return false;
    // It takes longer to pack b than a.
    const Parts columns(p.m, p.n, parts.count, true);
    if (4 * p.n >= 3 * p.m && columns.pieces % parts.count == 0) parts = columns;
    if (!parts.by_columns)
      parts.count = std::min(parts.count, parts.pieces * kCut / kRowsForLibrary);
  }
  if (!supported(parts, false)) return false;
  if constexpr (std::is_same_v<T, float>) {
    if (may_copy && copies_b(p, parts[0].rows)) {
      const Workspace copies(
          context,
          static_cast<std::size_t>(parts.count * kCopiedDepth * kCopiedColumns) * sizeof(float),
          "matmul");
      if (!copies.is_planned())
        multiply_copies(context, p, parts, static_cast<float*>(copies.data()));
      return true;
    }
  }
  if (p.c != nullptr) multiply_parts<T, C>(context, p, parts, nullptr);  // null: planned
  return true;
}

template <typename T>
void multiply(Context& context, const Product<T, T>& p, bool may_copy = false) {
  if constexpr (std::is_same_v<T, float>)
    if (multiplied_by_library(context, p, may_copy)) return;
  if (p.c == nullptr) return;  // a planned product
  const Parts parts = p.parts(context);
  context.threads().parallel_for(parts.count, 1, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      const Part part = parts[i];
      start(p, part);
      add_product(p.a.at(part.row, 0), p.b.at(0, part.column),
                  p.c + part.row * p.c_stride + part.column, p.c_stride, part.rows, part.columns,
                  p.k);
      finish(p, part);
    }
  });
}

void multiply_f32(Context& context, const Product<float, float>& p) {
  if (!multiplied_few_rows(context, p)) multiply(context, p, true);
}

void widen(Context& context, float* out, const BFloat16* in, Index rows, Index columns,
           Index stride) {
  for_rows(context, rows, columns, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      const BFloat16* from = in + i * stride;
      float* to = out + i * columns;
#pragma omp simd
      for (Index j = 0; j < columns; ++j) to[j] = load(from + j);
    }
  });
}

/// Rounds the sums [rows, columns] of a part of c, adds the addend, and runs the epilogue.
void round_part(Context& context, const Product<BFloat16, BFloat16>& p, const Part& part,
                const float* sums) {
  for_rows(context, part.rows, part.columns, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      const Index row = part.row + i;
      const float* const from = sums + i * part.columns;
      BFloat16* const to = p.c + row * p.c_stride + part.column;
      const BFloat16* const addend =
          p.addend == nullptr ? nullptr : p.addend + row * p.addend_stride + part.column;
#pragma omp simd
      for (Index j = 0; j < part.columns; ++j)
        store(to + j, addend != nullptr ? from[j] + load(addend + j) : from[j]);
      finish(p, {row, part.column, 1, part.columns});
    }
  });
}

template <typename T, typename C = T>
Product<T, C> product_of(const Matmul& args, Index m, Index n, Index k) {
  const TensorView& addend = args.accumulate ? args.c : args.residual;
  const bool keeps_pre = args.epilogue == Epilogue::Gelu && args.pre.defined();
  const TensorView& c = keeps_pre ? args.pre : args.c;
  return {{static_cast<const T*>(args.a.data), args.a.strides[0], args.transpose_a},
          {static_cast<const T*>(args.b.data), args.b.strides[0], args.transpose_b},
          static_cast<C*>(c.data),
          c.strides[0],
          m,
          n,
          k,
          static_cast<const T*>(args.bias.data),
          static_cast<const C*>(addend.data),
          addend.defined() ? addend.strides[0] : 0,
          args.epilogue,
          static_cast<C*>(args.c.data),
          static_cast<const C*>(args.pre.data)};
}

template <typename C>
void multiply_bf16(Context& context, const Matmul& args, Index m, Index n, Index k) {
  const Product<BFloat16, C> product = product_of<BFloat16, C>(args, m, n, k);
  if (multiplied_few_rows(context, product) || multiplied_by_library(context, product, true))
    return;
  const Index panel = std::min(n, kPanelColumns);
  const bool direct = std::is_same_v<C, float>;
  const Index elements = m * k + panel * k + n + (direct ? 0 : m * panel);
  const Workspace workspace(context, static_cast<std::size_t>(elements) * sizeof(float), "matmul");
  if (workspace.is_planned()) return;
  float* wide_a = static_cast<float*>(workspace.data());
  float* wide_b = wide_a + m * k;
  float* bias = wide_b + panel * k;
  float* sums = bias + n;
  const auto* a = static_cast<const BFloat16*>(args.a.data);
  const auto* b = static_cast<const BFloat16*>(args.b.data);
  const Index b_stride = args.b.strides[0];
  widen(context, wide_a, a, args.a.shape[0], args.a.shape[1], args.a.strides[0]);
  if (args.bias.data != nullptr)
    widen(context, bias, static_cast<const BFloat16*>(args.bias.data), 1, n, n);
  for (Index column = 0; column < n; column += panel) {
    const Index columns = std::min(panel, n - column);
    if (args.transpose_b)
      widen(context, wide_b, b + column * b_stride, columns, k, b_stride);
    else
      widen(context, wide_b, b + column, k, columns, b_stride);
    float* out = sums;
    Index out_stride = columns;
    const float* addend = nullptr;
    if constexpr (direct) {
      out = product.c + column;
      out_stride = product.c_stride;
      if (product.addend != nullptr) addend = product.addend + column;
    }
    multiply<float>(context, {{wide_a, args.a.shape[1], args.transpose_a},
                              {wide_b, args.transpose_b ? k : columns, args.transpose_b},
                              out,
                              out_stride,
                              m,
                              columns,
                              k,
                              args.bias.data != nullptr ? bias + column : nullptr,
                              addend,
                              product.addend_stride});
    if constexpr (!direct) round_part(context, product, {0, column, m, columns}, sums);
  }
}

/// Rows [begin, end) of a group.
struct Group {
  Index begin, end;
  Group(const TensorView& offsets, Index group)
      : begin(static_cast<const std::int32_t*>(offsets.data)[group]),
        end(static_cast<const std::int32_t*>(offsets.data)[group + 1]) {}
  Index rows() const { return end - begin; }
};

template <typename T, typename C>
Product<T, C> group_product(const GroupedMatmul& args, Index i, const Group& group) {
  const Index k = args.a.shape[1], n = args.c.view.shape[1];
  C* const c = static_cast<C*>(args.c.view.data) + group.begin * n;
  return {{static_cast<const T*>(args.a.data) + group.begin * k, k, false},
          {static_cast<const T*>(args.b[i].data), args.b[i].shape[1], args.transpose_b},
          c,
          n,
          group.rows(),
          n,
          k,
          nullptr,
          args.c.accumulate ? c : nullptr,
          n};
}

void grouped_f32(Context& context, const GroupedMatmul& args) {
  const Index k = args.a.shape[1], n = args.c.view.shape[1];
  const Index elements = few_rows_elements<float>(args.a.shape[0], n, k, args.transpose_b);
  const Workspace workspace(context, static_cast<std::size_t>(elements) * sizeof(float),
                            "grouped_matmul");
  if (workspace.is_planned()) return;
  for (Index i = 0; i < args.groups; ++i) {
    const Group group(args.offsets, args.first + i);
    if (group.rows() == 0) continue;
    const auto product = group_product<float, float>(args, i, group);
    if (!multiplied_few_rows(context, product, static_cast<float*>(workspace.data())))
      multiply(context, product);
  }
}

void grouped_f64(Context& context, const GroupedMatmul& args) {
  for (Index i = 0; i < args.groups; ++i) {
    const Group group(args.offsets, args.first + i);
    if (group.rows() > 0) multiply(context, group_product<double, double>(args, i, group));
  }
}

void grouped_bf16(Context& context, const GroupedMatmul& args) {
  const Index m = args.a.shape[0], k = args.a.shape[1], n = args.c.view.shape[1];
  const Index elements =
      std::max(m * k + n * k + m * n, few_rows_elements<BFloat16>(m, n, k, args.transpose_b));
  const Workspace workspace(context, static_cast<std::size_t>(elements) * sizeof(float),
                            "grouped_matmul");
  if (workspace.is_planned()) return;
  auto* const wide_a = static_cast<float*>(workspace.data());
  float* const wide_b = wide_a + m * k;
  float* const sums = wide_b + n * k;
  const auto* const a = static_cast<const BFloat16*>(args.a.data);
  for (Index i = 0; i < args.groups; ++i) {
    const Group group(args.offsets, args.first + i);
    if (group.rows() == 0) continue;
    const auto product = group_product<BFloat16, BFloat16>(args, i, group);
    if (multiplied_few_rows(context, product, wide_a) ||
        multiplied_by_library(context, product, false))
      continue;
    const Index columns = args.b[i].shape[1];
    widen(context, wide_a, a + group.begin * k, group.rows(), k, k);
    widen(context, wide_b, static_cast<const BFloat16*>(args.b[i].data), args.b[i].shape[0],
          columns, columns);
    multiply<float>(context, {{wide_a, k, false},
                              {wide_b, columns, args.transpose_b},
                              sums,
                              n,
                              group.rows(),
                              n,
                              k,
                              nullptr,
                              nullptr,
                              0});
    round_part(context, product, {0, 0, group.rows(), n}, sums);
  }
}

/// @param a, b  the rows of a group
template <typename T, typename C>
Product<T, C> gradient_product(const T* a, const T* b, Index rows, const GradientView& to) {
  const Index p = to.view.shape[0], q = to.view.shape[1];
  C* const c = static_cast<C*>(to.view.data);
  return {{a, p, true}, {b, q, false}, c, q, p, q, rows, nullptr, to.accumulate ? c : nullptr, q};
}

template <typename T>
void gradient_plain(Context& context, const GroupedGradient& args) {
  const auto* const a = static_cast<const T*>(args.a.data);
  const auto* const b = static_cast<const T*>(args.b.data);
  for (Index i = 0; i < args.groups; ++i) {
    const Group group(args.offsets, args.first + i);
    if (args.c[i])
      multiply(context,
               gradient_product<T, T>(a + group.begin * args.a.shape[1],
                                      b + group.begin * args.b.shape[1], group.rows(), args.c[i]));
  }
}

void gradient_bf16(Context& context, const GroupedGradient& args) {
  const Index m = args.a.shape[0], p = args.a.shape[1], q = args.b.shape[1];
  const Workspace workspace(context, static_cast<std::size_t>(m * (p + q)) * sizeof(float),
                            "grouped_gradient");
  if (workspace.is_planned()) return;
  auto* const wide_a = static_cast<float*>(workspace.data());
  float* const wide_b = wide_a + m * p;
  for (Index i = 0; i < args.groups; ++i) {
    const Group group(args.offsets, args.first + i);
    if (!args.c[i]) continue;
    const auto* const a = static_cast<const BFloat16*>(args.a.data) + group.begin * p;
    const auto* const b = static_cast<const BFloat16*>(args.b.data) + group.begin * q;
    if (multiplied_by_library(
            context, gradient_product<BFloat16, float>(a, b, group.rows(), args.c[i]), false))
      continue;
    widen(context, wide_a, a, group.rows(), p, p);
    widen(context, wide_b, b, group.rows(), q, q);
    multiply(context, gradient_product<float, float>(wide_a, wide_b, group.rows(), args.c[i]));
  }
}

}  // namespace

void matmul(Context& context, const Matmul& args) {
  const Index m = args.c.shape[0];
  const Index n = args.c.shape[1];
  const Index k = args.a.shape[args.transpose_a ? 0 : 1];
  if (args.a.dtype == DType::F64)
    multiply(context, product_of<double>(args, m, n, k));
  else if (args.a.dtype == DType::F32)
    multiply_f32(context, product_of<float>(args, m, n, k));
  else if (args.c.dtype == DType::F32)
    multiply_bf16<float>(context, args, m, n, k);
  else
    multiply_bf16<BFloat16>(context, args, m, n, k);
}

void grouped_matmul(Context& context, const GroupedMatmul& args) {
  if (args.a.dtype == DType::F64)
    grouped_f64(context, args);
  else if (args.a.dtype == DType::F32)
    grouped_f32(context, args);
  else
    grouped_bf16(context, args);
}

void grouped_gradient(Context& context, const GroupedGradient& args) {
  if (args.a.dtype == DType::F64)
    gradient_plain<double>(context, args);
  else if (args.a.dtype == DType::F32)
    gradient_plain<float>(context, args);
  else
    gradient_bf16(context, args);
}

TESSERA_CPU_END
