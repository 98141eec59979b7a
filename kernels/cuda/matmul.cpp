#include "kernels/matmul.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <compare>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/context.h"
#include "core/base/cuda/backend.h"
#include "core/base/device_backend.h"
#include "kernels/cuda/export.h"
#include "kernels/elementwise_args.h"
#include "kernels/scratch.h"
#include "kernels/workspace.h"

// Matrix products by cuBLASLt. Because its matrices are column-major, it computes the transpose of
// c, op(b)' op(a)'.
//
// GELU and its gradient are fused into bf16 products where cuBLASLt supports it. Bias gradients are not: on
// an H100 its epilogues for them (BGRADA, BGRADB) saved no time, and they can't accumulate.
namespace tessera::kernels::cuda {

void cast(Context& context, const Cast& args);  // elementwise.cu

namespace {

using tessera::cuda::check;
using tessera::cuda::CudaBackend;
using tessera::cuda::KernelState;

void check_lt(cublasStatus_t status, std::string_view what) {
  require<OutOfMemory>(status != CUBLAS_STATUS_ALLOC_FAILED,
                       "matmul: {}: the GPU has no memory left{}", what,
                       tessera::cuda::memory_of_device());
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

// Minimum alignment of bias and pre, in bytes. cuBLASLt's heuristic has no setting for it and reads
// it from the pointers in the descriptor.
alignas(2 * kEpilogueAlignment) constexpr std::byte kPlaces[2 * kEpilogueAlignment]{};
constexpr const void* kAlignedPlace = &kPlaces[kEpilogueAlignment];
constexpr std::int64_t kPreStride = 8;  // the row length of pre is a multiple of it

/// Properties of a matrix product that select a cuBLASLt kernel.
struct Key {
  std::int64_t m, n, k;
  std::int64_t a_stride, b_stride, c_stride, residual_stride;
  std::uint32_t a_alignment, b_alignment, c_alignment, residual_alignment;  // in bytes, 256 at most
  DType dtype, c_dtype;
  bool transpose_a, transpose_b, accumulate, bias, pre;
  Epilogue epilogue;
  // clang-tidy 14 mistakes its 0 for a null pointer. NOLINTNEXTLINE(modernize-use-nullptr)
  auto operator<=>(const Key&) const = default;
};

std::uint32_t alignment(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256U;
  return std::uint32_t{1} << std::countr_zero(address);
}

/// A view of at most one row may have any stride: the row length replaces it.
std::int64_t leading_dim(const TensorView& x) {
  return std::max<std::int64_t>(x.shape[0] > 1 ? x.strides[0] : x.shape[1], 1);
}

Key key_of(const Matmul& x) {
  const TensorView& added = x.residual.defined() ? x.residual : x.c;
  return {x.c.shape[0],        x.c.shape[1],          x.a.shape[x.transpose_a ? 0 : 1],
          leading_dim(x.a),    leading_dim(x.b),      leading_dim(x.c),
          leading_dim(added),  alignment(x.a.data),   alignment(x.b.data),
          alignment(x.c.data), alignment(added.data), x.a.dtype,
          x.c.dtype,           x.transpose_a,         x.transpose_b,
          x.accumulate,        x.bias.defined(),      x.pre.defined(),
          x.epilogue};
}

cublasLtEpilogue_t epilogue_of(const Key& key) {
  switch (key.epilogue) {
    case Epilogue::Gelu:
      if (key.pre) return key.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      return key.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case Epilogue::GeluGradient:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::None:
      break;
  }
  return key.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

constexpr int kMostCandidates = 16;

/// The cuBLASLt kernel for a key, or the reason why there is none.
class Plan {
 public:
  /// @param timed  whether the first run() selects the fastest of the kernels that cuBLASLt names
  ///   first, which may be another one in the next process; else it is the first of them
  Plan(cublasLtHandle_t handle, const Key& key, bool timed)
      : a_(key.dtype, key.transpose_a ? key.m : key.k, key.transpose_a ? key.k : key.m,
           key.a_stride),
        b_(key.dtype, key.transpose_b ? key.k : key.n, key.transpose_b ? key.n : key.k,
           key.b_stride),
        c_(key.c_dtype, key.n, key.m, key.c_stride),
        added_(key.c_dtype, key.n, key.m, key.residual_stride) {
    const bool f64 = key.dtype == DType::F64;
    check_lt(cublasLtMatmulDescCreate(&description_, f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                      f64 ? CUDA_R_64F : CUDA_R_32F),
             "cublasLtMatmulDescCreate");
    try {
      set(CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
      set(CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(key));
      if (key.bias) {
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(key.c_dtype));
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, kAlignedPlace);
      }
      if (key.pre) {  // by default, pre has the dtype of c
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, kAlignedPlace);
      }
      // A product that is added to c can't be repeated to time it.
      find_algorithms(handle, key, timed && !key.accumulate ? kMostCandidates : 1);
    } catch (...) {
      cublasLtMatmulDescDestroy(description_);
      throw;
    }
  }
  ~Plan() { cublasLtMatmulDescDestroy(description_); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  /// Reason why cuBLASLt can't run the product; empty if it can.
  const std::string& why_not() const { return why_not_; }

  /// Queues the product. @param bias  in c's dtype, or null
  /// @return false if cuBLASLt rejects the epilogue; then nothing is queued and why_not() is set
  bool run(CudaBackend& backend, const Matmul& args, void* workspace, const void* bias) {
    if (bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (args.pre.defined()) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, args.pre.data);
    const bool f64 = args.a.dtype == DType::F64;
    const float one = 1.0F;
    const bool adds = args.accumulate || args.residual.defined();
    const void* const added = args.residual.defined() ? args.residual.data : args.c.data;
    const float beta = adds ? 1.0F : 0.0F;
    const double one64 = 1.0;
    const double beta64 = adds ? 1.0 : 0.0;
    const auto stream = static_cast<cudaStream_t>(backend.stream());
    const auto multiply = [&](const Candidate& candidate) {
      return cublasLtMatmul(backend.cublas_lt().get(), description_,
                            f64 ? static_cast<const void*>(&one64) : &one, args.b.data, b_.get(),
                            args.a.data, a_.get(), f64 ? static_cast<const void*>(&beta64) : &beta,
                            added, added_.get(), args.c.data, c_.get(), &candidate.algorithm,
                            workspace, candidate.workspace_bytes, stream);
    };
    if (candidates_.size() > 1) keep_fastest(stream, multiply);
    const cublasStatus_t status = multiply(candidates_.front());
    const bool refused = status == CUBLAS_STATUS_NOT_SUPPORTED ||
                         status == CUBLAS_STATUS_INVALID_VALUE ||
                         status == CUBLAS_STATUS_ARCH_MISMATCH;
    if (refused && args.epilogue != Epilogue::None) {
      why_not_ = fmt::format("cublasLtMatmul: {}", cublasLtGetStatusString(status));
      return false;
    }
    check_lt(status, "cublasLtMatmul");
    return true;
  }
  std::size_t workspace_bytes() const {
    std::size_t most = 0;
    for (const Candidate& candidate : candidates_) most = std::max(most, candidate.workspace_bytes);
    return most;
  }

 private:
  struct Candidate {
    cublasLtMatmulAlgo_t algorithm;
    std::size_t workspace_bytes;
  };

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check_lt(cublasLtMatmulDescSetAttribute(description_, attribute, &value, sizeof(value)),
             "cublasLtMatmulDescSetAttribute");
  }

  template <typename Multiply>
  void keep_fastest(cudaStream_t stream, const Multiply& multiply) {
    constexpr int kRuns = 3;
    tessera::cuda::Event begin(cudaEventDefault), end(cudaEventDefault);
    Candidate fastest = candidates_.front();
    double least = std::numeric_limits<double>::infinity();
    for (const Candidate& candidate : candidates_) {
      if (multiply(candidate) != CUBLAS_STATUS_SUCCESS) continue;
      for (int i = 0; i < kRuns; ++i) {
        begin.record(stream);
        if (multiply(candidate) != CUBLAS_STATUS_SUCCESS) break;
        end.record(stream);
        end.synchronize();
        if (const double ms = end.milliseconds_since(begin); ms < least) {
          least = ms;
          fastest = candidate;
        }
      }
    }
    candidates_ = {fastest};
  }

  void find_algorithms(cublasLtHandle_t handle, const Key& key, int most) {
    cublasLtMatmulPreference_t preference = nullptr;
    check_lt(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const auto set_preference = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
    };
    cublasStatus_t status = set_preference(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           static_cast<std::uint64_t>(kMostMatmulWorkspace));
    // Partial sums over k are reduced in float32, never in bf16.
    if (status == CUBLAS_STATUS_SUCCESS && key.c_dtype == DType::BF16)
      status = set_preference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                              std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    const std::pair<cublasLtMatmulPreferenceAttributes_t, std::uint32_t> alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.residual_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c_alignment}};
    for (const auto& [attribute, bytes] : alignments) {
      if (status == CUBLAS_STATUS_SUCCESS) status = set_preference(attribute, bytes);
    }
    std::array<cublasLtMatmulHeuristicResult_t, kMostCandidates> results{};
    int found = 0;
    if (status == CUBLAS_STATUS_SUCCESS)
      status =
          cublasLtMatmulAlgoGetHeuristic(handle, description_, b_.get(), a_.get(), added_.get(),
                                         c_.get(), preference, most, results.data(), &found);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || found < 1) {
      why_not_ = fmt::format(
          "cuBLASLt has no kernel for [{}, {}] x [{}, {}] in {} with leading dims {}, {}, {}: {}",
          key.m, key.k, key.k, key.n, key.dtype, key.a_stride, key.b_stride, key.c_stride,
          cublasLtGetStatusString(status));
      return;
    }
    for (const auto& result : std::span(results).first(static_cast<std::size_t>(found)))
      candidates_.push_back({result.algo, result.workspaceSize});
  }

  Layout a_, b_, c_, added_;
  cublasLtMatmulDesc_t description_ = nullptr;
  std::vector<Candidate> candidates_;
  std::string why_not_;
};

/// Reason why GELU is not fused on this GPU; empty if it is.
std::string why_no_epilogues(const cudaDeviceProp& gpu) {
  const char* wanted = std::getenv("TESSERA_EPILOGUES");  // NOLINT(concurrency-mt-unsafe)
  if (wanted != nullptr && *wanted != '\0')
    return std::string_view(wanted) == "0" ? "TESSERA_EPILOGUES=0" : "";
  // With other compute capabilities, cuBLASLt may run GELU as a slow pass after the product (see
  // llm.c's pull requests 338 and 653 for 8.9, SGLang's 34350 for 12.0).
  const bool fast = (gpu.major == 8 || gpu.major == 9) && gpu.minor == 0;
  return fast
             ? ""
             : fmt::format("not tested on compute capability {}.{}, TESSERA_EPILOGUES=1 enables it",
                           gpu.major, gpu.minor);
}

class MatmulPlans final : public KernelState {
 public:
  explicit MatmulPlans(const cudaDeviceProp& gpu)
      : why_no_epilogues_(cuda::why_no_epilogues(gpu)) {}

  Plan& get(cublasLtHandle_t handle, const Key& key, bool timed) {
    auto& plan = plans_[key];
    if (!plan) plan = std::make_unique<Plan>(handle, key, timed);
    return *plan;
  }
  const std::string& why_no_epilogues() const { return why_no_epilogues_; }

 private:
  const std::string why_no_epilogues_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

CudaBackend& backend_of(Context& context) { return static_cast<CudaBackend&>(context.backend()); }

MatmulPlans& plans_of(CudaBackend& backend) {
  if (!backend.matmul_state)
    backend.matmul_state = std::make_unique<MatmulPlans>(backend.properties());
  return static_cast<MatmulPlans&>(*backend.matmul_state);
}

/// Queues a matrix product with K > 0.
/// @return empty, or the reason why cuBLASLt can't run it; c is then unchanged
std::string run(Context& context, const Matmul& args) {
  CudaBackend& backend = backend_of(context);
  Plan& plan =
      plans_of(backend).get(backend.cublas_lt().get(), key_of(args), !context.deterministic());
  if (!plan.why_not().empty()) return plan.why_not();
  const Workspace workspace(context, plan.workspace_bytes(), "matmul");
  // cuBLASLt needs a bias in c's dtype, aligned to kEpilogueAlignment.
  const TensorView& bias = args.bias;
  const void* taken = bias.data;
  std::optional<Workspace> moved;
  if (const std::size_t bytes = scratch_bytes(context.limits(), args); bytes > 0) {
    moved.emplace(context, bytes, "matmul");
    taken = moved->data();
    cuda::cast(
        context,
        {bias, {dense_view(moved->data(), args.c.dtype, bias.shape, bias.device), false, true}});
  }
  return plan.run(backend, args, workspace.data(), taken) ? "" : plan.why_not();
}

constexpr std::int64_t kAlignedRows = 8;  // cuBLASLt's fast kernels need a multiple of it
constexpr std::int64_t kTileRows = 128;

/// Rows of c that are a product of their own, or 0: with a transposed, where their number is not aligned in
/// rows of a that are. On an H100, cuBLASLt 13.0 multiplies [50257, 9472], transposed, and [9472, 768] at
/// 450 TFLOP/s, the first 50176 rows at 710.
std::int64_t aligned_rows(const Matmul& args) {
  const std::int64_t rows = args.c.shape[0];
  const bool slow = args.transpose_a && args.a.dtype == DType::BF16 && rows % kAlignedRows != 0 &&
                    args.a.strides[0] % kAlignedRows == 0;
  return slow && rows >= 2 * kTileRows ? rows / kTileRows * kTileRows : 0;
}

/// Rows [begin, begin + count) of c, with a transposed.
Matmul rows_of(const Matmul& args, std::int64_t begin, std::int64_t count) {
  Matmul part = args;
  part.a = args.a.narrow(1, begin, count);
  part.c = args.c.narrow(0, begin, count);
  if (args.residual.defined()) part.residual = args.residual.narrow(0, begin, count);
  return part;
}

/// Reason why GELU can't be fused for these arguments; empty if it can.
std::string why_no_gelu(const MatmulPlans& plans, const Matmul& x) {
  if (!plans.why_no_epilogues().empty()) return plans.why_no_epilogues();
  if (x.a.dtype != DType::BF16) return fmt::format("the dtype is {}", x.a.dtype);
  if (!x.pre.defined()) return {};
  if (x.pre.shape[1] % kPreStride != 0)
    return fmt::format("the row length {} is no multiple of {}", x.pre.shape[1], kPreStride);
  if (alignment(x.pre.data) < kEpilogueAlignment)
    return fmt::format("pre does not begin at a multiple of {} bytes", kEpilogueAlignment);
  return {};
}

}  // namespace

void matmul(Context& context, const Matmul& args) {
  if (args.a.numel() == 0) {  // K = 0
    require<Unsupported>(!args.bias.defined() && !args.residual.defined(),
                         "matmul: K = 0 with a bias or a residual is not supported on CUDA");
    if (!args.accumulate)
      check(
          cudaMemset2DAsync(
              args.c.data, static_cast<std::size_t>(leading_dim(args.c)) * dtype_size(args.c.dtype),
              0, static_cast<std::size_t>(args.c.shape[1]) * dtype_size(args.c.dtype),
              static_cast<std::size_t>(args.c.shape[0]),
              static_cast<cudaStream_t>(context.backend().stream())),
          "matmul: clearing the result");
    return;
  }
  const std::int64_t rows = aligned_rows(args);
  std::string why_not = run(context, rows > 0 ? rows_of(args, 0, rows) : args);
  if (why_not.empty() && rows > 0)
    why_not = run(context, rows_of(args, rows, args.c.shape[0] - rows));
  require<Unsupported>(why_not.empty(), "matmul: {}", why_not);
}

/// Notes in the backend which implementation runs, and why.
void matmul_fused(Context& context, const FusedMatmul& args) {
  const Matmul& product = args.product;
  CudaBackend& backend = backend_of(context);
  const MatmulPlans& plans = plans_of(backend);
  std::string why = why_no_gelu(plans, product);
  if (why.empty()) why = run(context, product);
  args.done = why.empty();
  const char* what = product.epilogue == Epilogue::Gelu ? "GELU forward" : "GELU backward";
  backend.note(
      args.done ? fmt::format("{}: fused into cuBLASLt's matrix products", what)
                : fmt::format("{}: tessera's own kernel after the matrix product; {}", what, why));
}

TESSERA_CUDA_KERNEL(matmul, Matmul)
TESSERA_CUDA_KERNEL(matmul_fused, FusedMatmul)

}  // namespace tessera::kernels::cuda
