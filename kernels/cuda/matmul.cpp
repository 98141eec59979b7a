#include "kernels/matmul.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "core/base/context.h"
#include "core/base/cuda/backend.h"
#include "core/base/device_backend.h"
#include "core/base/product_tuning.h"
#include "kernels/activation.h"
#include "kernels/cuda/export.h"
#include "kernels/cuda/matmul_plan.h"
#include "kernels/elementwise_args.h"
#include "kernels/scratch.h"
#include "kernels/workspace.h"

// Matrix products by cuBLASLt. Because its matrices are column-major, it computes the transpose of
// c, op(b)' op(a)'.
//
// GELU and its gradient are fused into bf16 products where cuBLASLt supports it. Bias gradients are not: on
// an H100 its epilogues for them (BGRADA, BGRADB) saved no time, and they can't accumulate.
namespace tessera::kernels::cuda {

void cast(Context& context, const Cast& args);                 // elementwise.cu
void gelu_forward(Context& context, const GeluForward& args);  // activation.cu
void gelu_backward(Context& context, const GeluBackward& args);

namespace {

using tessera::cuda::check;
using tessera::cuda::CudaBackend;
using tessera::cuda::KernelState;

/// TESSERA_EPILOGUES; null if it is not set.
const char* wanted_epilogues() {
  const char* wanted = std::getenv("TESSERA_EPILOGUES");  // NOLINT(concurrency-mt-unsafe)
  return wanted != nullptr && *wanted != '\0' ? wanted : nullptr;
}

/// Reason why GELU is not fused on this GPU, unless tuned products say more; empty if it is.
std::string why_no_epilogues(const cudaDeviceProp& gpu) {
  if (const char* wanted = wanted_epilogues())
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
      : why_no_epilogues_(cuda::why_no_epilogues(gpu)),
        times_epilogues_(wanted_epilogues() == nullptr) {}

  MatmulPlan& get(CudaBackend& backend, const MatmulKey& key) {
    if (const int now = backend.product_tuning().generation(); now != generation_) {
      plans_.clear();
      generation_ = now;
    }
    auto& plan = plans_[key];
    if (!plan) plan = std::make_unique<MatmulPlan>(backend, key);
    return *plan;
  }
  const std::string& why_no_epilogues() const { return why_no_epilogues_; }
  /// Whether times decide about GELU, where products are tuned.
  bool times_epilogues() const { return times_epilogues_; }

 private:
  const std::string why_no_epilogues_;
  const bool times_epilogues_;
  int generation_ = 0;
  std::map<MatmulKey, std::unique_ptr<MatmulPlan>> plans_;
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
  MatmulPlan& plan = plans_of(backend).get(backend, key_of(args));
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
  plan.bind(args, taken);
  if (plan.is_to_time()) plan.time(backend, args, workspace.data());
  return plan.run(backend, args, workspace.data()) ? "" : plan.why_not();
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

/// Times a product with GELU, in one kernel and in two with the same buffers.
void time_gelu(Context& context, const Matmul& args, const std::string& name) {
  Matmul plain = args;
  plain.epilogue = Epilogue::None;
  plain.pre = {};
  const bool forward = args.epilogue == Epilogue::Gelu;
  if (forward && args.pre.defined()) plain.c = args.pre;
  CudaBackend& backend = backend_of(context);
  run(context, plain);
  run(context, args);
  const auto gelu = microseconds_of(static_cast<cudaStream_t>(backend.stream()), [&] {
    if (forward) gelu_forward(context, {plain.c, args.c});
    if (!forward) gelu_backward(context, {args.pre, args.c, {args.c, false, true}});
    return true;
  });
  backend.product_tuning().compare_apart(name, name_of(key_of(plain)), *gelu);
}

/// Reason why GELU is not fused for these arguments; empty if it is.
std::string why_no_gelu(Context& context, const Matmul& x) {
  if (x.a.dtype != DType::BF16) return fmt::format("the dtype is {}", x.a.dtype);
  if (x.pre.defined() && x.pre.shape[1] % kPreStride != 0)
    return fmt::format("the row length {} is no multiple of {}", x.pre.shape[1], kPreStride);
  if (x.pre.defined() && alignment(x.pre.data) < kEpilogueAlignment)
    return fmt::format("pre does not begin at a multiple of {} bytes", kEpilogueAlignment);
  CudaBackend& backend = backend_of(context);
  MatmulPlans& plans = plans_of(backend);
  if (!plans.times_epilogues()) return plans.why_no_epilogues();
  const MatmulPlan& plan = plans.get(backend, key_of(x));
  if (plan.is_to_time()) time_gelu(context, x, plan.name());
  if (!plan.apart()) return plans.why_no_epilogues();
  return *plan.apart() ? "faster in tuned products" : "";
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
  std::string why = why_no_gelu(context, product);
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
