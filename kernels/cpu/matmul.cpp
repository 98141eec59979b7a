#include "kernels/matmul.h"

#include <Eigen/Core>
#include <algorithm>

#include "core/base/thread_pool.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/grouped_matmul.h"
#include "kernels/product_library.h"
#include "kernels/workspace.h"

// oneDNN or Eigen multiplies f32 matrices (product_library.h). Eigen's templates dominate the compile
// time of this file, so only c += op(a) op(b) is instantiated, and f64, which only gradient checks
// use, has plain loops. Threads compute equal parts of the longer side of c, cut at multiples of kCut,
// so that results repeat exactly for a given number of threads. bf16 operands are first widened to
// f32 panels. Packing buffers of the libraries (per thread below 16 MiB, with Eigen 4 MiB) are not in the
// memory ledger.
TESSERA_CPU_BEGIN
namespace {

using Index = std::int64_t;
constexpr Index kCut = 48;             // columns or rows; a multiple of Eigen's register tiles
constexpr Index kRowsForLibrary = 96;  // Eigen multiplies fewer rows faster
constexpr Index kPanelColumns = 2048;  // columns of b and c per panel, for bf16

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>>;
using Out = Eigen::Map<RowMajor, 0, Eigen::OuterStride<>>;

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

void fill_zeros(auto* c, Index c_stride, Index m, Index n) {
  for (Index i = 0; i < m; ++i) std::fill_n(c + i * c_stride, n, 0);
}

/// c = op(a) op(b), or added to c.
void multiply(const Operand<float>& a, const Operand<float>& b, float* c, Index c_stride, Index m,
              Index n, Index k, bool accumulate) {
  const auto op = [](bool transposed) { return transposed ? 'T' : 'N'; };
  // Without terms oneDNN leaves c as it is.
  const Sgemm sgemm = m >= kRowsForLibrary && k > 0 ? product_library().sgemm : nullptr;
  if (sgemm != nullptr && sgemm(op(a.transposed), op(b.transposed), m, n, k, a.data, a.stride,
                                b.data, b.stride, accumulate ? 1.0F : 0.0F, c, c_stride))
    return;
  if (!accumulate) fill_zeros(c, c_stride, m, n);
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
void multiply(const Operand<double>& a, const Operand<double>& b, double* c, Index c_stride,
              Index m, Index n, Index k, bool accumulate) {
  if (!accumulate) fill_zeros(c, c_stride, m, n);
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

template <typename T>
void multiply_threaded(Context& context, const Operand<T>& a, const Operand<T>& b, T* c,
                       Index c_stride, Index m, Index n, Index k, const T* bias, bool accumulate) {
  const bool by_columns = n >= m;
  const Index side = by_columns ? n : m;
  const Index pieces = (side + kCut - 1) / kCut;
  // One part per thread, because a library packs all of one operand anew for each part.
  const bool serial = m * n * k < (1 << 18);
  const Index parts = serial ? 1 : std::min<Index>(context.threads().size(), pieces);
  const auto multiply_part = [&](Index part) {
    const Index first = part * pieces / parts * kCut;
    const Index count = std::min(side, (part + 1) * pieces / parts * kCut) - first;
    const Index row = by_columns ? 0 : first;
    const Index column = by_columns ? first : 0;
    const Index rows = by_columns ? m : count;
    const Index columns = by_columns ? count : n;
    T* out = c + row * c_stride + column;
    for (Index i = 0; bias != nullptr && i < rows; ++i) {
      T* line = out + i * c_stride;
      const T* from = bias + column;
#pragma omp simd
      for (Index j = 0; j < columns; ++j) line[j] = accumulate ? line[j] + from[j] : from[j];
    }
    multiply(a.at(row, 0), b.at(0, column), out, c_stride, rows, columns, k,
             accumulate || bias != nullptr);
  };
  context.threads().parallel_for(parts, 1, [&](Index begin, Index end) {
    for (Index part = begin; part < end; ++part) multiply_part(part);
  });
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

void narrow(Context& context, BFloat16* out, const float* in, Index rows, Index columns,
            Index stride, bool accumulate) {
  for_rows(context, rows, columns, [=](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      const float* from = in + i * columns;
      BFloat16* to = out + i * stride;
#pragma omp simd
      for (Index j = 0; j < columns; ++j)
        store(to + j, accumulate ? from[j] + load(to + j) : from[j]);
    }
  });
}

template <typename C>
void multiply_bf16(Context& context, const Matmul& args, Index m, Index n, Index k) {
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
  const Index c_stride = args.c.strides[0];
  widen(context, wide_a, a, args.a.shape[0], args.a.shape[1], args.a.strides[0]);
  if (args.bias.data != nullptr)
    widen(context, bias, static_cast<const BFloat16*>(args.bias.data), 1, n, n);
  for (Index column = 0; column < n; column += panel) {
    const Index columns = std::min(panel, n - column);
    if (args.transpose_b)
      widen(context, wide_b, b + column * b_stride, columns, k, b_stride);
    else
      widen(context, wide_b, b + column, k, columns, b_stride);
    C* c = static_cast<C*>(args.c.data) + column;
    float* out = sums;
    Index out_stride = columns;
    if constexpr (direct) {
      out = c;
      out_stride = c_stride;
    }
    multiply_threaded<float>(
        context, {wide_a, args.a.shape[1], args.transpose_a},
        {wide_b, args.transpose_b ? k : columns, args.transpose_b}, out, out_stride, m, columns, k,
        args.bias.data != nullptr ? bias + column : nullptr, direct && args.accumulate);
    if constexpr (!direct) narrow(context, c, sums, m, columns, c_stride, args.accumulate);
  }
}

template <typename T>
void multiply_plain(Context& context, const Matmul& args, Index m, Index n, Index k) {
  multiply_threaded<T>(context,
                       {static_cast<const T*>(args.a.data), args.a.strides[0], args.transpose_a},
                       {static_cast<const T*>(args.b.data), args.b.strides[0], args.transpose_b},
                       static_cast<T*>(args.c.data), args.c.strides[0], m, n, k,
                       static_cast<const T*>(args.bias.data), args.accumulate);
}

/// Rows [begin, end) of a group.
struct Group {
  Index begin, end;
  Group(const TensorView& offsets, Index group)
      : begin(static_cast<const std::int32_t*>(offsets.data)[group]),
        end(static_cast<const std::int32_t*>(offsets.data)[group + 1]) {}
  Index rows() const { return end - begin; }
};

template <typename T>
void grouped_plain(Context& context, const GroupedMatmul& args) {
  const Index k = args.a.shape[1], n = args.c.view.shape[1];
  for (Index i = 0; i < args.groups; ++i) {
    const Group group(args.offsets, args.first + i);
    if (group.rows() == 0) continue;
    multiply_threaded<T>(
        context, {static_cast<const T*>(args.a.data) + group.begin * k, k, false},
        {static_cast<const T*>(args.b[i].data), args.b[i].shape[1], args.transpose_b},
        static_cast<T*>(args.c.view.data) + group.begin * n, n, group.rows(), n, k, nullptr,
        args.c.accumulate);
  }
}

void grouped_bf16(Context& context, const GroupedMatmul& args) {
  const Index m = args.a.shape[0], k = args.a.shape[1], n = args.c.view.shape[1];
  const Workspace workspace(
      context, static_cast<std::size_t>(m * k + n * k + m * n) * sizeof(float), "grouped_matmul");
  if (workspace.is_planned()) return;
  auto* const wide_a = static_cast<float*>(workspace.data());
  float* const wide_b = wide_a + m * k;
  float* const sums = wide_b + n * k;
  const auto* const a = static_cast<const BFloat16*>(args.a.data);
  auto* const c = static_cast<BFloat16*>(args.c.view.data);
  for (Index i = 0; i < args.groups; ++i) {
    const Group group(args.offsets, args.first + i);
    if (group.rows() == 0) continue;
    const Index columns = args.b[i].shape[1];
    widen(context, wide_a, a + group.begin * k, group.rows(), k, k);
    widen(context, wide_b, static_cast<const BFloat16*>(args.b[i].data), args.b[i].shape[0],
          columns, columns);
    multiply_threaded<float>(context, {wide_a, k, false}, {wide_b, columns, args.transpose_b}, sums,
                             n, group.rows(), n, k, nullptr, false);
    narrow(context, c + group.begin * n, sums, group.rows(), n, n, args.c.accumulate);
  }
}

/// @param a, b  the rows of a group
template <typename T>
void group_gradient(Context& context, const T* a, const T* b, Index rows, const GradientView& to) {
  const Index p = to.view.shape[0], q = to.view.shape[1];
  multiply_threaded<T>(context, {a, p, true}, {b, q, false}, static_cast<T*>(to.view.data), q, p, q,
                       rows, nullptr, to.accumulate);
}

template <typename T>
void gradient_plain(Context& context, const GroupedGradient& args) {
  const auto* const a = static_cast<const T*>(args.a.data);
  const auto* const b = static_cast<const T*>(args.b.data);
  for (Index i = 0; i < args.groups; ++i) {
    const Group group(args.offsets, args.first + i);
    if (args.c[i])
      group_gradient<T>(context, a + group.begin * args.a.shape[1],
                        b + group.begin * args.b.shape[1], group.rows(), args.c[i]);
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
    widen(context, wide_a, static_cast<const BFloat16*>(args.a.data) + group.begin * p,
          group.rows(), p, p);
    widen(context, wide_b, static_cast<const BFloat16*>(args.b.data) + group.begin * q,
          group.rows(), q, q);
    group_gradient<float>(context, wide_a, wide_b, group.rows(), args.c[i]);
  }
}

}  // namespace

void matmul(Context& context, const Matmul& args) {
  const Index m = args.c.shape[0];
  const Index n = args.c.shape[1];
  const Index k = args.a.shape[args.transpose_a ? 0 : 1];
  if (args.a.dtype == DType::F64)
    multiply_plain<double>(context, args, m, n, k);
  else if (args.a.dtype == DType::F32)
    multiply_plain<float>(context, args, m, n, k);
  else if (args.c.dtype == DType::F32)
    multiply_bf16<float>(context, args, m, n, k);
  else
    multiply_bf16<BFloat16>(context, args, m, n, k);
}

void grouped_matmul(Context& context, const GroupedMatmul& args) {
  if (args.a.dtype == DType::F64)
    grouped_plain<double>(context, args);
  else if (args.a.dtype == DType::F32)
    grouped_plain<float>(context, args);
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
