#include "kernels/matmul.h"

#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/base/cuda/backend.h"
#include "kernels/activation.h"
#include "kernels/cuda/export.h"
#include "kernels/elementwise_args.h"
#include "kernels/workspace.h"

// Products are cuBLASLt's. It counts columns first: it is asked for the transpose of c, op(b)'
// op(a)', whose columns are the rows of c.
//
// GELU and its gradient are epilogues of bf16 products where cuBLASLt has them. The gradient of a
// bias is one where that is asked for, and for the first micro-batch alone: the epilogues that sum
// it up (BGRADA, BGRADB) store the sum and can't add it to a gradient.
namespace tessera::kernels::cuda {

// Of elementwise.cu and activation.cu.
void cast(Context& context, const Cast& args);
void gelu_forward(Context& context, const GeluForward& args);
void gelu_backward(Context& context, const GeluBackward& args);
void sum_rows(Context& context, const SumRows& args);

namespace {

using tessera::cuda::check;
using tessera::cuda::CudaBackend;
using tessera::cuda::KernelState;

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what Hopper's kernels ask for

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

enum class Epilogue : std::uint8_t { None, Gelu, GeluGradient, BiasGradientOfA, BiasGradientOfB };

bool sums_up_bias(Epilogue epilogue) {
  return epilogue == Epilogue::BiasGradientOfA || epilogue == Epilogue::BiasGradientOfB;
}

/// A product, and what is done with its sums before they are written.
struct Product {
  Matmul matmul;
  Epilogue epilogue = Epilogue::None;
  TensorView pre{};       // of GELU: contiguous, may be undefined in forward
  void* bias_gradient{};  // in c's dtype
};

// Where bias and pre begin, in bytes, at least. The heuristic takes it from their pointers: no
// preference tells it.
constexpr std::uint32_t kEpilogueAlignment = 16;
alignas(2 * kEpilogueAlignment) constexpr std::byte kPlaces[2 * kEpilogueAlignment]{};
constexpr const void* kAlignedPlace = &kPlaces[kEpilogueAlignment];
constexpr std::int64_t kPreStride = 8;  // rows of pre are multiples of it

/// What decides which of cuBLASLt's kernels fits.
struct Key {
  std::int64_t m, n, k;
  std::int64_t a_stride, b_stride, c_stride;
  std::uint32_t a_alignment, b_alignment, c_alignment;  // in bytes, 256 at most
  DType dtype, c_dtype;
  bool transpose_a, transpose_b, accumulate, bias, pre;
  Epilogue epilogue;
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

Key key_of(const Product& product) {
  const Matmul& x = product.matmul;
  return {x.c.shape[0],
          x.c.shape[1],
          x.a.shape[x.transpose_a ? 0 : 1],
          leading_dim(x.a),
          leading_dim(x.b),
          leading_dim(x.c),
          alignment(x.a.data),
          alignment(x.b.data),
          alignment(x.c.data),
          x.a.dtype,
          x.c.dtype,
          x.transpose_a,
          x.transpose_b,
          x.accumulate,
          x.bias.defined(),
          product.pre.defined(),
          product.epilogue};
}

cublasLtEpilogue_t epilogue_of(const Key& key) {
  switch (key.epilogue) {
    case Epilogue::Gelu:
      if (key.pre) return key.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      return key.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case Epilogue::GeluGradient:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::BiasGradientOfA:  // cuBLASLt's B
      return CUBLASLT_EPILOGUE_BGRADB;
    case Epilogue::BiasGradientOfB:
      return CUBLASLT_EPILOGUE_BGRADA;
    case Epilogue::None:
      break;
  }
  return key.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/// A product ready to run, or known to have no kernel: built once per key.
class Plan {
 public:
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
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(key));
      if (key.bias || sums_up_bias(key.epilogue)) {
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(key.c_dtype));
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, kAlignedPlace);
      }
      if (key.pre) {  // its dtype is c's by default
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, kAlignedPlace);
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

  /// Empty, or why cuBLASLt can't run it.
  const std::string& why_not() const { return why_not_; }

  /// Queues the product. @param bias  in c's dtype, or null
  /// @return false: cuBLASLt refused the epilogue after all; nothing was queued, and why_not() says
  /// so from now on
  bool run(CudaBackend& backend, const Product& product, void* workspace, const void* bias) {
    const Matmul& args = product.matmul;
    if (bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (product.bias_gradient != nullptr)
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias_gradient);
    if (product.pre.defined()) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.pre.data);
    const bool f64 = args.a.dtype == DType::F64;
    const float one = 1.0F;
    const float beta = args.accumulate ? 1.0F : 0.0F;
    const double one64 = 1.0;
    const double beta64 = args.accumulate ? 1.0 : 0.0;
    const cublasStatus_t status =
        cublasLtMatmul(backend.cublas_lt().get(), description_,
                       f64 ? static_cast<const void*>(&one64) : &one, args.b.data, b_.get(),
                       args.a.data, a_.get(), f64 ? static_cast<const void*>(&beta64) : &beta,
                       args.c.data, c_.get(), args.c.data, c_.get(), &algorithm_, workspace,
                       workspace_bytes_, static_cast<cudaStream_t>(backend.stream()));
    const bool refused = status == CUBLAS_STATUS_NOT_SUPPORTED ||
                         status == CUBLAS_STATUS_INVALID_VALUE ||
                         status == CUBLAS_STATUS_ARCH_MISMATCH;
    if (refused && product.epilogue != Epilogue::None) {
      why_not_ = fmt::format("cublasLtMatmul: {}", cublasLtGetStatusString(status));
      return false;
    }
    check_lt(status, "cublasLtMatmul");
    return true;
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
    // Parts of a sum over k are added up in float32, never in a bf16 result.
    if (status == CUBLAS_STATUS_SUCCESS && key.c_dtype == DType::BF16)
      status = set_preference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                              std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
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
    if (status != CUBLAS_STATUS_SUCCESS || found != 1) {
      why_not_ = fmt::format(
          "cuBLASLt has no kernel for [{}, {}] x [{}, {}] in {} with leading dims {}, {}, {}: {}",
          key.m, key.k, key.k, key.n, key.dtype, key.a_stride, key.b_stride, key.c_stride,
          cublasLtGetStatusString(status));
      return;
    }
    algorithm_ = best.algo;
    workspace_bytes_ = best.workspaceSize;
  }

  Layout a_, b_, c_;
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
  std::size_t workspace_bytes_ = 0;
  std::string why_not_;
};

/// Empty, or why products leave GELU to a kernel of its own.
std::string why_no_epilogues(const cudaDeviceProp& gpu) {
  const char* wanted = std::getenv("TESSERA_EPILOGUES");  // NOLINT(concurrency-mt-unsafe)
  if (wanted != nullptr && *wanted != '\0')
    return std::string_view(wanted) == "0" ? "TESSERA_EPILOGUES=0" : "";
  // On others cuBLASLt has been seen to run GELU as a slow pass after the product (llm.c's pull
  // requests 338 and 653 for 8.9, SGLang's 34350 for 12.0).
  const bool fast = (gpu.major == 8 || gpu.major == 9) && gpu.minor == 0;
  return fast ? ""
              : fmt::format("untried on compute capability {}.{}, TESSERA_EPILOGUES=1 tries it",
                            gpu.major, gpu.minor);
}

/// Whether that pays has not been measured.
bool wants_bias_epilogue() {
  const char* wanted = std::getenv("TESSERA_BIAS_EPILOGUE");  // NOLINT(concurrency-mt-unsafe)
  return wanted != nullptr && std::string_view(wanted) == "1";
}

/// What a backend knows of products.
class Products final : public KernelState {
 public:
  explicit Products(const cudaDeviceProp& gpu) : why_no_epilogues_(cuda::why_no_epilogues(gpu)) {}

  Plan& get(cublasLtHandle_t handle, const Key& key) {
    auto& plan = plans_[key];
    if (!plan) plan = std::make_unique<Plan>(handle, key);
    return *plan;
  }
  const std::string& why_no_epilogues() const { return why_no_epilogues_; }
  bool bias_epilogue() const { return bias_epilogue_; }

 private:
  const bool bias_epilogue_ = wants_bias_epilogue();
  const std::string why_no_epilogues_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

CudaBackend& backend_of(Context& context) { return static_cast<CudaBackend&>(context.backend()); }

Products& products_of(CudaBackend& backend) {
  if (!backend.matmul_state)
    backend.matmul_state = std::make_unique<Products>(backend.properties());
  return static_cast<Products&>(*backend.matmul_state);
}

/// Queues a product that has terms. @return empty, or why cuBLASLt can't run it; nothing was done
/// to c then
std::string run(Context& context, const Product& product) {
  CudaBackend& backend = backend_of(context);
  Plan& plan = products_of(backend).get(backend.cublas_lt().get(), key_of(product));
  if (!plan.why_not().empty()) return plan.why_not();
  const Workspace workspace(context, plan.workspace_bytes(), "matmul");
  // cuBLASLt takes a bias in c's dtype; its kernels read it in packs.
  const TensorView& bias = product.matmul.bias;
  const void* taken = bias.data;
  std::optional<Workspace> moved;
  const DType dtype = product.matmul.c.dtype;
  if (bias.defined() && (bias.dtype != dtype || alignment(bias.data) < kEpilogueAlignment)) {
    moved.emplace(context, static_cast<std::size_t>(bias.numel()) * dtype_size(dtype), "matmul");
    taken = moved->data();
    cuda::cast(context,
               {bias, {dense_view(moved->data(), dtype, bias.shape, bias.device), false, true}});
  }
  return plan.run(backend, product, workspace.data(), taken) ? "" : plan.why_not();
}

/// Empty, or why the arguments don't fit GELU's epilogues.
std::string why_not_fused(const Product& product) {
  const Matmul& x = product.matmul;
  const TensorView& pre = product.pre;
  if (x.a.dtype != DType::BF16) return fmt::format("the dtype is {}", x.a.dtype);
  if (x.a.numel() == 0) return "there are no terms";
  if (!pre.defined()) return {};
  if (pre.shape[1] % kPreStride != 0)
    return fmt::format("rows of {} are no multiple of {}", pre.shape[1], kPreStride);
  if (alignment(pre.data) < kEpilogueAlignment)
    return fmt::format("pre does not begin at a multiple of {} bytes", kEpilogueAlignment);
  return {};
}

/// Runs a product with its epilogue, if that can be. Notes in the backend which kernels serve, and
/// why. @return false: nothing was done
bool run_fused(Context& context, const Product& product, const char* name) {
  CudaBackend& backend = backend_of(context);
  std::string why = products_of(backend).why_no_epilogues();
  if (why.empty()) why = why_not_fused(product);
  if (why.empty()) why = run(context, product);
  backend.note(why.empty()
                   ? fmt::format("GELU {}: within cuBLASLt's products", name)
                   : fmt::format("GELU {}: tessera's own kernel after the product; {}", name, why));
  return why.empty();
}

/// Runs the product with the sums of the bias as its epilogue, if that is asked for and can be.
/// @return false: nothing was done
bool run_with_bias_gradient(Context& context, const MatmulBiasGradient& args) {
  CudaBackend& backend = backend_of(context);
  const DType dtype = args.product.c.dtype;
  // A gradient that is accumulated on is the same layer's in a later micro-batch.
  if (!products_of(backend).bias_epilogue() || args.bias.accumulate) return false;
  std::string why;
  if (args.product.a.dtype != DType::BF16)
    why = fmt::format("the dtype is {}", args.product.a.dtype);
  else if (dtype != args.bias.view.dtype)
    why = fmt::format("the weight's gradient is {}, the bias's {}", dtype, args.bias.view.dtype);
  else if (alignment(args.bias.view.data) < kEpilogueAlignment)
    why = fmt::format("it does not begin at a multiple of {} bytes", kEpilogueAlignment);
  else
    why =
        run(context, {.matmul = args.product,
                      .epilogue = args.of_a ? Epilogue::BiasGradientOfA : Epilogue::BiasGradientOfB,
                      .bias_gradient = args.bias.view.data});
  backend.note(
      why.empty()
          ? std::string("bias gradients: within cuBLASLt's products")
          : fmt::format("a bias gradient: tessera's own kernel beside the product; {}", why));
  return why.empty();
}

}  // namespace

void matmul(Context& context, const Matmul& args) {
  if (args.a.numel() == 0) {  // no terms
    require<Unsupported>(!args.bias.defined(), "matmul: a product of no terms has no bias on CUDA");
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
  const std::string why_not = run(context, {args});
  require<Unsupported>(why_not.empty(), "matmul: {}", why_not);
}

void matmul_gelu(Context& context, const MatmulGelu& args) {
  if (run_fused(context, {args.product, Epilogue::Gelu, args.pre}, "forward")) return;
  Matmul product = args.product;
  if (args.pre.defined()) product.c = args.pre;
  cuda::matmul(context, product);
  cuda::gelu_forward(context, {product.c, args.product.c});
}

void matmul_gelu_backward(Context& context, const MatmulGeluBackward& args) {
  if (run_fused(context, {args.product, Epilogue::GeluGradient, args.pre}, "backward")) return;
  const TensorView& c = args.product.c;
  cuda::matmul(context, args.product);
  cuda::gelu_backward(context, {args.pre, c, {c, false, true}});
}

void matmul_bias_gradient(Context& context, const MatmulBiasGradient& args) {
  if (run_with_bias_gradient(context, args)) return;
  cuda::matmul(context, args.product);
  cuda::sum_rows(context, {args.gradient(), args.bias});
}

TESSERA_CUDA_KERNEL(matmul, Matmul)
TESSERA_CUDA_KERNEL(matmul_bias_gradient, MatmulBiasGradient)
TESSERA_CUDA_KERNEL(matmul_gelu, MatmulGelu)
TESSERA_CUDA_KERNEL(matmul_gelu_backward, MatmulGeluBackward)

}  // namespace tessera::kernels::cuda
