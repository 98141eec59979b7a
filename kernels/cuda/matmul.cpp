#include "kernels/matmul.h"

#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <map>
#include <memory>
#include <utility>

#include "core/base/cuda/backend.h"
#include "kernels/cuda/export.h"
#include "kernels/workspace.h"

// Products are cuBLASLt's. It counts columns first: it is asked for the transpose of c, op(b)'
// op(a)', whose columns are the rows of c.
namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::check;
using tessera::cuda::CudaBackend;
using tessera::cuda::KernelState;

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what Hopper's kernels ask for

void check_lt(cublasStatus_t status, std::string_view what) {
  require<OutOfMemory>(status != CUBLAS_STATUS_ALLOC_FAILED,
                       "matmul: {}: the GPU has no memory left", what);
  require<CudaError>(status == CUBLAS_STATUS_SUCCESS, "matmul: {}: {}", what,
                     cublasLtGetStatusString(status));
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::F64:
      return CUDA_R_64F;
    case DType::BF16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

class Layout {
 public:
  Layout(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    check_lt(
        cublasLtMatrixLayoutCreate(&layout_, data_type(dtype), static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), stride),
        "cublasLtMatrixLayoutCreate");
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(layout_); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  cublasLtMatrixLayout_t layout_ = nullptr;
};

/// What decides which of cuBLASLt's kernels fits.
struct Key {
  std::int64_t m, n, k;
  std::int64_t a_stride, b_stride, c_stride;
  std::uint32_t a_alignment, b_alignment, c_alignment;  // in bytes, 256 at most
  DType dtype, c_dtype;
  bool transpose_a, transpose_b, accumulate, bias;
  // clang-tidy 14 takes its 0 for a pointer's. NOLINTNEXTLINE(modernize-use-nullptr)
  auto operator<=>(const Key&) const = default;
};

std::uint32_t alignment(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256U;
  return std::uint32_t{1} << std::countr_zero(address);
}

/// Rows of one element or fewer may have any stride.
std::int64_t leading_dim(const TensorView& x) {
  return std::max<std::int64_t>(x.shape[0] > 1 ? x.strides[0] : x.shape[1], 1);
}

Key key_of(const Matmul& x) {
  return {x.c.shape[0],        x.c.shape[1],        x.a.shape[x.transpose_a ? 0 : 1],
          leading_dim(x.a),    leading_dim(x.b),    leading_dim(x.c),
          alignment(x.a.data), alignment(x.b.data), alignment(x.c.data),
          x.a.dtype,           x.c.dtype,           x.transpose_a,
          x.transpose_b,       x.accumulate,        x.bias.defined()};
}

/// A product ready to run: built once per key.
class Plan {
 public:
  /// @throws Unsupported if cuBLASLt has no kernel for it
  Plan(cublasLtHandle_t handle, const Key& key)
      : a_(key.dtype, key.transpose_a ? key.m : key.k, key.transpose_a ? key.k : key.m,
           key.a_stride),
        b_(key.dtype, key.transpose_b ? key.k : key.n, key.transpose_b ? key.n : key.k,
           key.b_stride),
        c_(key.c_dtype, key.n, key.m, key.c_stride) {
    const bool f64 = key.dtype == DType::F64;
    check_lt(cublasLtMatmulDescCreate(&description_, f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                      f64 ? CUDA_R_64F : CUDA_R_32F),
             "cublasLtMatmulDescCreate");
    try {
      set(CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
      set(CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
      if (key.bias) {
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(key.dtype));
      }
      find_algorithm(handle, key);
    } catch (...) {
      cublasLtMatmulDescDestroy(description_);
      throw;
    }
  }
  ~Plan() { cublasLtMatmulDescDestroy(description_); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  void run(CudaBackend& backend, const Matmul& args, void* workspace, void* bias) {
    if (bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    const bool f64 = args.a.dtype == DType::F64;
    const float one = 1.0F;
    const float beta = args.accumulate ? 1.0F : 0.0F;
    const double one64 = 1.0;
    const double beta64 = args.accumulate ? 1.0 : 0.0;
    check_lt(cublasLtMatmul(backend.cublas_lt().get(), description_,
                            f64 ? static_cast<const void*>(&one64) : &one, args.b.data, b_.get(),
                            args.a.data, a_.get(), f64 ? static_cast<const void*>(&beta64) : &beta,
                            args.c.data, c_.get(), args.c.data, c_.get(), &algorithm_, workspace,
                            workspace_bytes_, static_cast<cudaStream_t>(backend.stream())),
             "cublasLtMatmul");
  }
  std::size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check_lt(cublasLtMatmulDescSetAttribute(description_, attribute, &value, sizeof(value)),
             "cublasLtMatmulDescSetAttribute");
  }

  void find_algorithm(cublasLtHandle_t handle, const Key& key) {
    cublasLtMatmulPreference_t preference = nullptr;
    check_lt(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const auto set_preference = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
    };
    cublasStatus_t status = set_preference(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           static_cast<std::uint64_t>(kWorkspaceBytes));
    const std::pair<cublasLtMatmulPreferenceAttributes_t, std::uint32_t> alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c_alignment}};
    for (const auto& [attribute, bytes] : alignments) {
      if (status == CUBLAS_STATUS_SUCCESS) status = set_preference(attribute, bytes);
    }
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasLtMatmulAlgoGetHeuristic(handle, description_, b_.get(), a_.get(), c_.get(),
                                              c_.get(), preference, 1, &best, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    require<Unsupported>(
        status == CUBLAS_STATUS_SUCCESS && found == 1,
        "matmul: cuBLASLt has no kernel for [{}, {}] x [{}, {}] in {} with leading "
        "dims {}, {}, {}: {}",
        key.m, key.k, key.k, key.n, key.dtype, key.a_stride, key.b_stride, key.c_stride,
        cublasLtGetStatusString(status));
    algorithm_ = best.algo;
    workspace_bytes_ = best.workspaceSize;
  }

  Layout a_, b_, c_;
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
  std::size_t workspace_bytes_ = 0;
};

/// The plans of a backend.
class Plans final : public KernelState {
 public:
  Plan& get(cublasLtHandle_t handle, const Key& key) {
    auto& plan = plans_[key];
    if (!plan) plan = std::make_unique<Plan>(handle, key);
    return *plan;
  }

 private:
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace

void matmul(Context& context, const Matmul& args) {
  auto& backend = static_cast<CudaBackend&>(context.backend());
  if (args.a.numel() == 0) {  // no terms
    require<Unsupported>(!args.bias.defined(), "matmul: a product of no terms has no bias on CUDA");
    if (!args.accumulate)
      check(
          cudaMemset2DAsync(
              args.c.data, static_cast<std::size_t>(leading_dim(args.c)) * dtype_size(args.c.dtype),
              0, static_cast<std::size_t>(args.c.shape[1]) * dtype_size(args.c.dtype),
              static_cast<std::size_t>(args.c.shape[0]),
              static_cast<cudaStream_t>(backend.stream())),
          "matmul: clearing the result");
    return;
  }
  if (!backend.matmul_state) backend.matmul_state = std::make_unique<Plans>();
  Plan& plan =
      static_cast<Plans&>(*backend.matmul_state).get(backend.cublas_lt().get(), key_of(args));
  const Workspace workspace(context, plan.workspace_bytes(), "matmul");
  // Kernels read a bias in packs, though no preference of the heuristic tells where it begins.
  const bool misplaced = args.bias.defined() && alignment(args.bias.data) < 16;
  const Workspace moved(context, misplaced ? args.bias.bytes() : 0, "matmul");
  if (misplaced)
    check(cudaMemcpyAsync(moved.data(), args.bias.data, args.bias.bytes(), cudaMemcpyDeviceToDevice,
                          static_cast<cudaStream_t>(backend.stream())),
          "matmul: moving the bias");
  plan.run(backend, args, workspace.data(), misplaced ? moved.data() : args.bias.data);
}

TESSERA_CUDA_KERNEL(matmul, Matmul)

}  // namespace tessera::kernels::cuda
