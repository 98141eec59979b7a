#pragma once

#include <cublasLt.h>

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/base/cuda/backend.h"
#include "core/base/dtype.h"
#include "core/base/product_tuning.h"
#include "kernels/matmul.h"

namespace tessera::kernels::cuda {

inline constexpr std::int64_t kPreStride = 8;  ///< the row length of pre is a multiple of it

/// Alignment of an address in bytes, 256 at most.
std::uint32_t alignment(const void* data);
/// A view of at most one row may have any stride: the row length replaces it.
std::int64_t leading_dim(const TensorView& x);

/// Properties of a matrix product that select a cuBLASLt kernel.
struct MatmulKey {
  std::int64_t m, n, k;
  std::int64_t a_stride, b_stride, c_stride, residual_stride;
  std::uint32_t a_alignment, b_alignment, c_alignment, residual_alignment;  // in bytes, 256 at most
  DType dtype, c_dtype;
  bool transpose_a, transpose_b, accumulate, bias, pre;
  Epilogue epilogue;
  // clang-tidy 14 mistakes its 0 for a null pointer. NOLINTNEXTLINE(modernize-use-nullptr)
  auto operator<=>(const MatmulKey&) const = default;
};
MatmulKey key_of(const Matmul& x);

/// Name in TunedProducts. A product that accumulates can't be repeated to time it: it has the name, and
/// so the kernel, of the one that does not.
std::string name_of(const MatmulKey& key);

/// Shape of a column-major matrix.
class MatrixLayout {
 public:
  MatrixLayout(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride);
  ~MatrixLayout() { cublasLtMatrixLayoutDestroy(layout_); }
  MatrixLayout(const MatrixLayout&) = delete;
  MatrixLayout& operator=(const MatrixLayout&) = delete;
  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  cublasLtMatrixLayout_t layout_ = nullptr;
};

/// The cuBLASLt kernel for a key, or the reason why there is none: the tuned one, else the one that
/// cuBLASLt names first.
class MatmulPlan {
 public:
  MatmulPlan(tessera::cuda::CudaBackend& backend, const MatmulKey& key);
  ~MatmulPlan() { cublasLtMatmulDescDestroy(description_); }
  MatmulPlan(const MatmulPlan&) = delete;
  MatmulPlan& operator=(const MatmulPlan&) = delete;

  const std::string& name() const { return name_; }
  /// Reason why cuBLASLt can't run the product; empty if it can.
  const std::string& why_not() const { return why_not_; }
  /// Whether the epilogue runs in a kernel of its own; nothing if no tuned product says so.
  std::optional<bool> apart() const { return apart_; }
  /// Whether time() is due.
  bool is_to_time() const { return !candidates_.empty(); }
  /// For run() and time().
  std::size_t workspace_bytes() const;

  /// Sets the addresses that change from call to call. @param bias  in c's dtype, or null
  void bind(const Matmul& args, const void* bias);
  /// Times the kernels that cuBLASLt names, for ProductTuning; overwrites c and pre. Call bind() before.
  void time(tessera::cuda::CudaBackend& backend, const Matmul& args, void* workspace);
  /// Queues the product. Call bind() before.
  /// @return false if cuBLASLt rejects the epilogue; then nothing is queued and why_not() is set
  bool run(tessera::cuda::CudaBackend& backend, const Matmul& args, void* workspace);

 private:
  struct Candidate {
    cublasLtMatmulAlgo_t algorithm;
    std::size_t workspace_bytes;
  };

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value);
  void select(tessera::cuda::CudaBackend& backend, const MatmulKey& key);
  std::optional<Candidate> accepted(cublasLtHandle_t handle, const TunedProduct& tuned) const;
  std::vector<Candidate> find_algorithms(cublasLtHandle_t handle, const MatmulKey& key, int most);
  cublasStatus_t multiply(tessera::cuda::CudaBackend& backend, const Matmul& args, void* workspace,
                          const Candidate& candidate);
  void note_refusal(tessera::cuda::CudaBackend& backend) const;

  const std::string name_;
  MatrixLayout a_, b_, c_, added_;
  cublasLtMatmulDesc_t description_ = nullptr;
  Candidate first_{};
  std::optional<Candidate> tuned_;
  std::vector<Candidate> candidates_;  // to time
  std::optional<bool> apart_;
  std::string why_not_;
};

/// Waits for the stream. @param queue  queues work; false: it can't
/// @return the least of three runs after a first one; nothing if the work can't be queued
template <typename Queue>
std::optional<double> microseconds_of(cudaStream_t stream, const Queue& queue) {
  constexpr int kRuns = 3;
  if (!queue()) return std::nullopt;
  tessera::cuda::Event begin(cudaEventDefault), end(cudaEventDefault);
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRuns; ++i) {
    begin.record(stream);
    if (!queue()) return std::nullopt;
    end.record(stream);
    end.synchronize();
    least = std::min(least, 1e3 * end.milliseconds_since(begin));
  }
  return least;
}

}  // namespace tessera::kernels::cuda
