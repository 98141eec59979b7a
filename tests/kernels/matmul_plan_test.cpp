// The host code of products on CUDA against a fake cuBLASLt: which kernel runs, timed or not.
#include <cublasLt.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/base/context.h"
#include "core/base/device_backend.h"
#include "core/base/product_tuning.h"
#include "kernels/activation.h"
#include "kernels/elementwise_args.h"
#include "kernels/matmul.h"
#include "tests/support/cuda_runtime/fake_gpu.h"

namespace {

using Ids = std::vector<int>;

/// Kernels have ids. One takes as many microseconds as it puts pieces of work into the stream, times a
/// constant.
struct FakeLt {
  Ids named = {1, 2, 3};             ///< best first, as cuBLASLt thinks
  std::array<int, 4> plain_times{};  ///< by id
  std::array<int, 4> fused_times{};
  int gelu_time = 1;
  std::set<int> refused_by_check{}, refused_by_run{};
  bool has_fused = true, runs_fused = true;
};
FakeLt lt;

constexpr int kGelu = 9;

const std::array<char, 10> places{};  // addresses of kernels, by id

void queue(cudaStream_t stream, int id, int times) {
  cudaLaunchConfig_t config{};
  config.stream = stream;
  for (int i = 0; i < times; ++i)
    cudaLaunchKernelExC(&config, &places.at(static_cast<std::size_t>(id)), nullptr);
}

std::size_t workspace_of(int id) { return 1000 * static_cast<std::size_t>(id); }

bool is_fused(cublasLtMatmulDesc_t description) {
  const auto epilogue = static_cast<cublasLtEpilogue_t>(description->data[0]);
  return epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue != CUBLASLT_EPILOGUE_BIAS;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType, uint64_t,
                                          uint64_t, int64_t) {
  *layout = new cublasLtMatrixLayoutOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t,
                                        cudaDataType_t) {
  *description = new cublasLtMatmulDescOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete description;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t) {
  if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE)
    description->data[0] = *static_cast<const cublasLtEpilogue_t*>(value);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int most,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
  if (is_fused(description) && !lt.has_fused) return CUBLAS_STATUS_NOT_SUPPORTED;
  *found = std::min(most, static_cast<int>(lt.named.size()));
  for (int i = 0; i < *found; ++i) {
    const int id = lt.named[static_cast<std::size_t>(i)];
    results[i].algo.data[0] = static_cast<std::uint64_t>(id);
    results[i].workspaceSize = workspace_of(id);
  }
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  const auto id = static_cast<int>(algorithm->data[0]);
  result->workspaceSize = workspace_of(id);
  return lt.refused_by_check.contains(id) ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void*,
                              const void*, cublasLtMatrixLayout_t, const void*,
                              cublasLtMatrixLayout_t, const void*, const void*,
                              cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t,
                              const cublasLtMatmulAlgo_t* algorithm, void*, size_t,
                              cudaStream_t stream) {
  const auto id = static_cast<int>(algorithm->data[0]);
  if (lt.refused_by_run.contains(id) || (is_fused(description) && !lt.runs_fused))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  const auto& times = is_fused(description) ? lt.fused_times : lt.plain_times;
  queue(stream, id, times.at(static_cast<std::size_t>(id)));
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"

namespace tessera::kernels::cuda {

void matmul(Context& context, const Matmul& args);
void matmul_fused(Context& context, const FusedMatmul& args);

void cast(Context&, const Cast&) {}
void gelu_forward(Context& context, const GeluForward&) {
  queue(static_cast<cudaStream_t>(context.backend().stream()), kGelu, lt.gelu_time);
}
void gelu_backward(Context& context, const GeluBackward& args) {
  gelu_forward(context, {args.x, args.grad_y});
}

namespace {

constexpr const char* kGpu = "Fake H100, cuBLASLt 13.1.0";

/// A context on a new fake GPU, and the products [8, 16] x [16, 32] on it.
struct Products {
  explicit Products(int major = 9) {
    lt = {.plain_times = {0, 5, 3, 4}, .fused_times = {0, 8, 7, 9}};
    test::fake_gpu() = {};
    test::fake_gpu().major = major;
    if (major == 8) test::fake_gpu().minor = 9;
    context =
        Context::create({.device = {DeviceType::CUDA, 0}, .plugin = TESSERA_FAKE_CUDA_PLUGIN});
  }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  ProductTuning& tuning() const { return context->backend().product_tuning(); }
  /// Results of the timing since the last use(), if all are of this GPU.
  std::map<std::string, TunedProduct> take() const {
    const TunedProducts timed = tuning().take_timed();
    if (timed.empty()) return {};
    REQUIRE(timed.size() == 1);
    return timed.at(kGpu);
  }
  static TensorView view(std::int64_t rows, std::int64_t columns) {
    alignas(256) static std::array<std::byte, 1024> memory;
    const Shape shape{rows, columns};
    return {memory.data(), DType::BF16, shape, contiguous_strides(shape), {DeviceType::CUDA, 0}};
  }
  Matmul product(Epilogue epilogue = Epilogue::None) const {
    Matmul args{view(8, 16), view(16, 32), view(8, 32)};
    args.epilogue = epilogue;
    if (epilogue != Epilogue::None) args.pre = view(8, 32);
    return args;
  }
  /// Id of the kernel that ran last.
  int last() const {
    context->backend().synchronize();
    const auto& launched = test::fake_gpu().launched;
    return launched.empty()
               ? 0
               : static_cast<int>(static_cast<const char*>(launched.back()) - places.data());
  }
  int run(bool accumulate = false) const {
    Matmul args = product();
    args.accumulate = accumulate;
    cuda::matmul(*context, args);
    return last();
  }
  /// Id of the kernel of a fused product; 0 if the product and its epilogue are to run apart.
  int run_fused(Epilogue epilogue) const {
    bool done = false;
    const Matmul args = product(epilogue);
    cuda::matmul_fused(*context, {args, done});
    return done ? last() : 0;
  }

  std::shared_ptr<Context> context;
};

TEST_CASE("without tuning the kernel that cuBLASLt names first runs, and nothing is timed") {
  const Products products;
  CHECK(products.run() == 1);
  CHECK(products.run_fused(Epilogue::Gelu) == 1);
  CHECK(test::fake_gpu().calls["cudaEventElapsedTime"] == 0);
}

TEST_CASE("the fastest kernel is used after use(), also by a product that accumulates") {
  const Products products;
  products.tuning().use({}, 10);
  CHECK(products.run(true) == 1);
  CHECK(products.take().empty());  // can't be repeated
  CHECK(products.run() == 1);
  CHECK(products.run() == 1);
  const auto timed = products.take();
  REQUIRE(timed.size() == 1);
  const auto& [name, entry] = *timed.begin();
  CHECK(name == "8x32x16 NN bf16 to bf16 strides 16 32 32 32 aligned 256 256 256 256");
  CHECK(entry.algorithm == "02" + std::string(126, '0'));
  CHECK(entry.workspace_bytes == 2000);
  CHECK(entry.microseconds == 3000);

  products.tuning().use({{kGpu, timed}}, 10);
  CHECK(products.run() == 2);
  CHECK(products.run(true) == 2);
  CHECK(products.take().empty());
  Matmul adds = products.product();
  adds.residual = Products::view(8, 64).narrow(1, 0, 32);  // can be repeated
  cuda::matmul(*products.context, adds);
  REQUIRE(products.take().size() == 1);
  products.tuning().use({{"Fake H100, cuBLASLt 13.0.0", timed}}, 0);
  CHECK(products.run() == 1);
}

TEST_CASE(
    "a kernel that cuBLASLt refuses is replaced by the one that it names first, with a note") {
  const Products products;
  products.tuning().use({}, 10);
  products.run();
  auto timed = products.take();
  const std::string algorithm = timed.begin()->second.algorithm;
  SUBCASE("by its check") { lt.refused_by_check = {2}; }
  SUBCASE("when it runs") { lt.refused_by_run = {2}; }
  SUBCASE("for an algorithm of another size") { timed.begin()->second.algorithm = "02"; }
  SUBCASE("for its workspace") { timed.begin()->second.workspace_bytes = 1999; }
  products.context->backend().take_notes();
  products.tuning().use({{kGpu, timed}}, 0);
  CHECK(products.run() == 1);
  const auto notes = products.context->backend().take_notes();
  REQUIRE(notes.size() == 1);
  CHECK(notes[0].starts_with("tuned products: cuBLASLt refuses the kernel for 8x32x16 NN"));
}

TEST_CASE("times decide whether GELU is fused, on any GPU") {
  for (const Epilogue epilogue : {Epilogue::Gelu, Epilogue::GeluGradient}) {
    for (const int major : {8, 9}) {
      for (const int gelu_time : {3, 5}) {
        CAPTURE(major);
        CAPTURE(gelu_time);
        const Products products(major);
        lt.gelu_time = gelu_time;  // 3 of the fastest plain kernel and this, against 7
        products.tuning().use({}, 10);
        CHECK(products.run_fused(epilogue) ==
              (major == 9 ? 1 : 0));  // the rule of the architecture
        const auto timed = products.take();
        CHECK(timed.size() == 2);  // also of the plain product
        products.tuning().use({{kGpu, timed}}, 10);
        CHECK(products.run_fused(epilogue) == (gelu_time == 5 ? 2 : 0));
        CHECK(products.run() == 2);
        CHECK(products.take().empty());
      }
    }
  }
}

TEST_CASE("GELU runs apart where cuBLASLt fuses nothing, or TESSERA_EPILOGUES says so") {
  SUBCASE("no fused kernel") {
    const Products products;
    lt.has_fused = false;
    products.tuning().use({}, 10);
    CHECK(products.run_fused(Epilogue::Gelu) == 0);
    CHECK(products.take().empty());
  }
  SUBCASE("all fused kernels are refused when they run") {
    const Products products;
    lt.runs_fused = false;
    products.tuning().use({}, 10);
    CHECK(products.run_fused(Epilogue::Gelu) == 0);
    CHECK(products.take().size() == 2);
  }
  SUBCASE("TESSERA_EPILOGUES=0") {
    ::setenv("TESSERA_EPILOGUES", "0", 1);
    const Products products;
    lt.gelu_time = 5;
    products.tuning().use({}, 10);
    CHECK(products.run_fused(Epilogue::Gelu) == 0);
    CHECK(products.take().empty());
    ::unsetenv("TESSERA_EPILOGUES");
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
