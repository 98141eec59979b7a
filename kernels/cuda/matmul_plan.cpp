#include "kernels/cuda/matmul_plan.h"

#include <array>
#include <bit>
#include <chrono>
#include <span>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "kernels/scratch.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::CudaBackend;

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

// Minimum alignment of bias and pre, in bytes. cuBLASLt's heuristic has no setting for it and reads
// it from the pointers in the descriptor.
alignas(2 * kEpilogueAlignment) constexpr std::byte kPlaces[2 * kEpilogueAlignment]{};
constexpr const void* kAlignedPlace = &kPlaces[kEpilogueAlignment];
constexpr int kMostCandidates = 16;

cublasLtEpilogue_t epilogue_of(const MatmulKey& key) {
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

bool is_refusal(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
         status == CUBLAS_STATUS_ARCH_MISMATCH;
}

}  // namespace

std::uint32_t alignment(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256U;
  return std::uint32_t{1} << std::countr_zero(address);
}

std::int64_t leading_dim(const TensorView& x) {
  return std::max<std::int64_t>(x.shape[0] > 1 ? x.strides[0] : x.shape[1], 1);
}

MatmulKey key_of(const Matmul& x) {
  const TensorView& added = x.residual.defined() ? x.residual : x.c;
  return {x.c.shape[0],        x.c.shape[1],          x.a.shape[x.transpose_a ? 0 : 1],
          leading_dim(x.a),    leading_dim(x.b),      leading_dim(x.c),
          leading_dim(added),  alignment(x.a.data),   alignment(x.b.data),
          alignment(x.c.data), alignment(added.data), x.a.dtype,
          x.c.dtype,           x.transpose_a,         x.transpose_b,
          x.accumulate,        x.bias.defined(),      x.pre.defined(),
          x.epilogue};
}

std::string name_of(const MatmulKey& x) {
  constexpr const char* kEpilogues[] = {"", " gelu", " gelu_gradient"};
  return fmt::format("{}x{}x{} {}{} {} to {} strides {} {} {} {} aligned {} {} {} {}{}{}{}", x.m,
                     x.n, x.k, x.transpose_a ? 'T' : 'N', x.transpose_b ? 'T' : 'N', x.dtype,
                     x.c_dtype, x.a_stride, x.b_stride, x.c_stride, x.residual_stride,
                     x.a_alignment, x.b_alignment, x.c_alignment, x.residual_alignment,
                     x.bias ? " bias" : "", x.pre ? " pre" : "",
                     kEpilogues[static_cast<int>(x.epilogue)]);
}

MatrixLayout::MatrixLayout(DType dtype, std::int64_t rows, std::int64_t columns,
                           std::int64_t stride) {
  check_lt(cublasLtMatrixLayoutCreate(&layout_, data_type(dtype), static_cast<std::uint64_t>(rows),
                                      static_cast<std::uint64_t>(columns), stride),
           "cublasLtMatrixLayoutCreate");
}

template <typename T>
void MatmulPlan::set(cublasLtMatmulDescAttributes_t attribute, T value) {
  check_lt(cublasLtMatmulDescSetAttribute(description_, attribute, &value, sizeof(value)),
           "cublasLtMatmulDescSetAttribute");
}

MatmulPlan::MatmulPlan(CudaBackend& backend, const MatmulKey& key)
    : name_(name_of(key)),
      a_(key.dtype, key.transpose_a ? key.m : key.k, key.transpose_a ? key.k : key.m, key.a_stride),
      b_(key.dtype, key.transpose_b ? key.k : key.n, key.transpose_b ? key.n : key.k, key.b_stride),
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
    select(backend, key);
  } catch (...) {
    cublasLtMatmulDescDestroy(description_);
    throw;
  }
}

std::size_t MatmulPlan::workspace_bytes() const {
  std::size_t most = std::max(first_.workspace_bytes, tuned_.value_or(first_).workspace_bytes);
  for (const Candidate& candidate : candidates_) most = std::max(most, candidate.workspace_bytes);
  return most;
}

void MatmulPlan::select(CudaBackend& backend, const MatmulKey& key) {
  cublasLtHandle_t handle = backend.cublas_lt().get();
  const std::vector<Candidate> named = find_algorithms(handle, key, 1);
  if (named.empty()) return;
  first_ = named.front();
  ProductTuning& tuning = backend.product_tuning();
  const TunedProduct* const entry = tuning.find(name_, [&](const TunedProduct& tuned) {
    tuned_ = accepted(handle, tuned);
    if (!tuned_) note_refusal(backend);
    return tuned_.has_value();
  });
  if (entry != nullptr) apart_ = entry->apart;
  if (!key.accumulate && tuning.is_to_time(name_)) {
    candidates_ = find_algorithms(handle, key, kMostCandidates);
    why_not_.clear();  // there is first_
  }
}

std::optional<MatmulPlan::Candidate> MatmulPlan::accepted(cublasLtHandle_t handle,
                                                          const TunedProduct& tuned) const {
  Candidate result{{}, static_cast<std::size_t>(tuned.workspace_bytes)};
  if (!from_hex(tuned.algorithm, std::as_writable_bytes(std::span(result.algorithm.data))))
    return std::nullopt;
  cublasLtMatmulHeuristicResult_t found{};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(
      handle, description_, b_.get(), a_.get(), added_.get(), c_.get(), &result.algorithm, &found);
  const bool fits = found.workspaceSize <= result.workspace_bytes &&
                    tuned.workspace_bytes <= kMostMatmulWorkspace;
  return status == CUBLAS_STATUS_SUCCESS && fits ? std::optional(result) : std::nullopt;
}

/// The kernels that cuBLASLt names, best first; if there is none, sets why_not_.
std::vector<MatmulPlan::Candidate> MatmulPlan::find_algorithms(cublasLtHandle_t handle,
                                                               const MatmulKey& key, int most) {
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
    status = cublasLtMatmulAlgoGetHeuristic(handle, description_, b_.get(), a_.get(), added_.get(),
                                            c_.get(), preference, most, results.data(), &found);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || found < 1) {
    why_not_ = fmt::format(
        "cuBLASLt has no kernel for [{}, {}] x [{}, {}] in {} with leading dims {}, {}, {}: {}",
        key.m, key.k, key.k, key.n, key.dtype, key.a_stride, key.b_stride, key.c_stride,
        cublasLtGetStatusString(status));
    return {};
  }
  std::vector<Candidate> candidates;
  for (const auto& result : std::span(results).first(static_cast<std::size_t>(found)))
    candidates.push_back({result.algo, result.workspaceSize});
  return candidates;
}

void MatmulPlan::bind(const Matmul& args, const void* bias) {
  if (bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (args.pre.defined()) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, args.pre.data);
}

cublasStatus_t MatmulPlan::multiply(CudaBackend& backend, const Matmul& args, void* workspace,
                                    const Candidate& candidate) {
  const bool f64 = args.a.dtype == DType::F64;
  const float one = 1.0F;
  const bool adds = args.accumulate || args.residual.defined();
  const void* const added = args.residual.defined() ? args.residual.data : args.c.data;
  const float beta = adds ? 1.0F : 0.0F;
  const double one64 = 1.0;
  const double beta64 = adds ? 1.0 : 0.0;
  return cublasLtMatmul(backend.cublas_lt().get(), description_,
                        f64 ? static_cast<const void*>(&one64) : &one, args.b.data, b_.get(),
                        args.a.data, a_.get(), f64 ? static_cast<const void*>(&beta64) : &beta,
                        added, added_.get(), args.c.data, c_.get(), &candidate.algorithm, workspace,
                        candidate.workspace_bytes, static_cast<cudaStream_t>(backend.stream()));
}

void MatmulPlan::note_refusal(CudaBackend& backend) const {
  backend.note(fmt::format(
      "tuned products: cuBLASLt refuses the kernel for {}; it uses the one that it names first",
      name_));
}

void MatmulPlan::time(CudaBackend& backend, const Matmul& args, void* workspace) {
  std::vector<TunedProduct> kernels;
  for (const Candidate& candidate : candidates_)
    kernels.push_back({to_hex(std::as_bytes(std::span(candidate.algorithm.data))),
                       static_cast<std::int64_t>(candidate.workspace_bytes)});
  const auto stream = static_cast<cudaStream_t>(backend.stream());
  ProductTuning& tuning = backend.product_tuning();
  bool time_is_left = true;
  const auto time_one = [&](std::size_t i) -> std::optional<double> {
    if (!time_is_left) return std::nullopt;
    const auto began = std::chrono::steady_clock::now();
    const std::optional<double> found = microseconds_of(stream, [&] {
      return multiply(backend, args, workspace, candidates_[i]) == CUBLAS_STATUS_SUCCESS;
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    time_is_left = tuning.spend(took.count());
    return found;
  };
  const std::optional<TunedProduct> best = fastest(kernels, time_one);
  if (time_is_left) tuning.add(name_, best);  // else not all were timed
  candidates_.clear();
}

bool MatmulPlan::run(CudaBackend& backend, const Matmul& args, void* workspace) {
  cublasStatus_t status = multiply(backend, args, workspace, tuned_.value_or(first_));
  if (tuned_ && is_refusal(status)) {
    note_refusal(backend);
    tuned_.reset();
    status = multiply(backend, args, workspace, first_);
  }
  if (is_refusal(status) && args.epilogue != Epilogue::None) {
    why_not_ = fmt::format("cublasLtMatmul: {}", cublasLtGetStatusString(status));
    return false;
  }
  check_lt(status, "cublasLtMatmul");
  return true;
}

}  // namespace tessera::kernels::cuda
