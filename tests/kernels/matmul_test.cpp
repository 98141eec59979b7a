#include "kernels/matmul.h"

#include <sys/resource.h>
#include <sys/time.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>

#include "core/base/memory.h"
#include "kernels/activation.h"
#include "kernels/elementwise.h"
#include "kernels/product_library.h"
#include "tests/kernels/kernel_support.h"
#include "tests/support/paths.h"

namespace tessera::test {
namespace {

using kernels::Epilogue;
using kernels::Matmul;
using kernels::matmul;

/// A matrix with `gap` elements between its rows, which must stay unchanged.
class Matrix {
 public:
  static constexpr double kBetween = 77.0;
  Matrix(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t gap,
         const std::vector<double>& values)
      : rows_(rows), columns_(columns), stride_(columns + gap), buffer_(dtype, {rows, stride_}) {
    std::vector<double> all(static_cast<std::size_t>(rows * stride_), kBetween);
    for (std::int64_t i = 0; i < rows * columns; ++i)
      all[static_cast<std::size_t>(i / columns * stride_ + i % columns)] =
          values[static_cast<std::size_t>(i)];
    buffer_.set(all);
  }
  TensorView view() const {
    return {buffer_.view().data,
            buffer_.view().dtype,
            {rows_, columns_},
            {stride_, 1},
            buffer_.view().device};
  }
  /// Checks that the gaps are unchanged.
  std::vector<double> values() const {
    std::vector<double> result;
    bool kept = true;
    const auto all = buffer_.values();
    for (std::int64_t i = 0; i < rows_ * stride_; ++i) {
      if (i % stride_ < columns_)
        result.push_back(all[static_cast<std::size_t>(i)]);
      else
        kept = kept && all[static_cast<std::size_t>(i)] == kBetween;
    }
    CHECK(kept);
    return result;
  }
  const std::vector<char>& bytes() const { return buffer_.bytes(); }

 private:
  std::int64_t rows_, columns_, stride_;
  Buffer buffer_;
};

/// Operand that a product is added to.
enum class Added { Nothing, Result, Residual };
constexpr Added kAdded[] = {Added::Nothing, Added::Result, Added::Residual};

struct Case {
  std::int64_t m, k, n;
  DType dtype, c_dtype;
  bool transpose_a = false, transpose_b = false;
  Added added = Added::Nothing;
  bool bias = false;
  std::int64_t gap = 0;
};

class Problem {
 public:
  explicit Problem(const Case& c)
      : case_(c),
        a_(c.dtype, c.transpose_a ? c.k : c.m, c.transpose_a ? c.m : c.k, c.gap,
           Buffer::normal(c.m * c.k, 1)),
        b_(c.dtype, c.transpose_b ? c.n : c.k, c.transpose_b ? c.k : c.n, c.gap,
           Buffer::normal(c.k * c.n, 2)),
        bias_(c.dtype, {c.n}, Buffer::normal(c.n, 3)),
        start_(Buffer::normal(c.m * c.n, 4)),
        residual_(c.c_dtype, c.m, c.n, 2 * c.gap, start_) {}

  Matrix result() const { return Matrix(case_.c_dtype, case_.m, case_.n, case_.gap, start_); }

  void run(Context& context, const Matrix& result) const {
    Matmul args{.a = a_.view(),
                .b = b_.view(),
                .c = result.view(),
                .transpose_a = case_.transpose_a,
                .transpose_b = case_.transpose_b,
                .accumulate = case_.added == Added::Result};
    if (case_.added == Added::Residual) args.residual = residual_.view();
    if (case_.bias) args.bias = bias_.view();
    matmul(context, args);
  }

  std::vector<double> expected() const {
    const auto a = a_.values(), b = b_.values(), bias = bias_.values();
    auto c = Matrix(case_.c_dtype, case_.m, case_.n, 0, start_).values();
    for (std::int64_t i = 0; i < case_.m; ++i) {
      for (std::int64_t j = 0; j < case_.n; ++j) {
        double sum = case_.bias ? bias[static_cast<std::size_t>(j)] : 0.0;
        for (std::int64_t p = 0; p < case_.k; ++p)
          sum +=
              a[static_cast<std::size_t>(case_.transpose_a ? p * case_.m + i : i * case_.k + p)] *
              b[static_cast<std::size_t>(case_.transpose_b ? j * case_.k + p : p * case_.n + j)];
        double& out = c[static_cast<std::size_t>(i * case_.n + j)];
        out = case_.added == Added::Nothing ? sum : out + sum;
      }
    }
    return c;
  }

 private:
  Case case_;
  Matrix a_, b_;
  Buffer bias_;
  std::vector<double> start_;
  Matrix residual_;
};

void check_case(const Case& c) {
  CAPTURE(c.m);
  CAPTURE(c.k);
  CAPTURE(c.n);
  CAPTURE(dtype_name(c.dtype));
  CAPTURE(dtype_name(c.c_dtype));
  CAPTURE(c.transpose_a);
  CAPTURE(c.transpose_b);
  CAPTURE(static_cast<int>(c.added));
  CAPTURE(c.bias);
  CAPTURE(c.gap);
  const Problem problem(c);
  const auto expected = problem.expected();
  // A sum of k products of standard normal numbers has standard deviation sqrt(k).
  const double magnitude = 4.0 * std::sqrt(static_cast<double>(c.k) + 1.0);
  const DType rounded = c.c_dtype;
  const double terms = rounded == DType::BF16 ? 0.01 : magnitude;
  const auto check = [&](const Matrix& got) {
    check_close(got.values(), expected, tolerance(rounded), terms);
  };
  // Tensor cores truncate the sum of every 16 products. Where rows, or their lengths, are not
  // aligned, cuBLASLt rounds the product to bf16 before it adds bias and c, and again after.
  const auto check_gpu = [&](const Matrix& got) {
    const double truncated =
        c.dtype == DType::BF16 ? std::ldexp(static_cast<double>(c.k) / 16, -23) : 0.0;
    const bool twice = rounded == DType::BF16 && (c.bias || c.added != Added::Nothing) &&
                       (c.n % 8 != 0 || (c.n + c.gap) % 8 != 0);
    check_close(got.values(), expected, tolerance(rounded) * (twice ? 2 : 1) + truncated,
                twice ? 4.0 : terms);
  };
  for_gpu_context([&](Context& context) {
    if (c.k == 0 && (c.bias || c.added == Added::Residual)) return;  // Unsupported there
    const Problem on_device(c);
    const Matrix got = on_device.result();
    on_device.run(context, got);
    check_gpu(got);
  });
  if (gpu_only()) return;
  std::optional<CpuLevel> level;
  std::vector<char> one_thread;
  for_each_cpu_context([&](Context& context) {
    const Matrix got = problem.result();
    problem.run(context, got);
    check(got);
    if (level != context.cpu_level()) {
      level = context.cpu_level();
      one_thread = got.bytes();
    }
    // With AVX-512 a library may sum parts of another size in another order.
    if (kernels::product_library().has_bf16) return;
    CHECK(got.bytes() == one_thread);
  });
}

struct Types {
  DType operand, result;
};
constexpr Types kTypes[] = {{DType::F32, DType::F32},
                            {DType::F64, DType::F64},
                            {DType::BF16, DType::BF16},
                            {DType::BF16, DType::F32}};
struct Size {
  std::int64_t m, k, n;
};

TEST_CASE("matmul matches float64 for all transposes, dtypes and odd shapes") {
  for (const Types& types : kTypes)
    for (const Size& size : {Size{1, 1, 1}, Size{3, 31, 33}, Size{33, 257, 31}, Size{257, 33, 3},
                             Size{1, 257, 257}, Size{31, 1, 257}, Size{17, 3, 100}})
      for (const bool transpose_a : {false, true})
        for (const bool transpose_b : {false, true})
          for (const Added added : kAdded)
            check_case({size.m, size.k, size.n, types.operand, types.result, transpose_a,
                        transpose_b, added});
}

TEST_CASE("products with few rows, longer than the parts that are computed at a time") {
  for (const Types& types : kTypes)
    for (const std::int64_t m : {1, 7})
      for (const bool transpose_b : {false, true})
        for (const Added added : kAdded)
          for (const Size& size : {Size{m, 33, 2101}, Size{m, 2101, 31}, Size{m, 525, 1030}})
            check_case({size.m, size.k, size.n, types.operand, types.result, false, transpose_b,
                        added, true, 5});
}

TEST_CASE("with few rows, a row's product has the same bits whatever the number of rows") {
  if (gpu_only()) return;
  for (const DType dtype : {DType::F32, DType::BF16})
    for (const bool transpose_b : {false, true})
      for_each_cpu_context([&](Context& context) {
        const auto first_row = [&](std::int64_t m) {
          const Problem problem(
              {m, 601, 1217, dtype, dtype, false, transpose_b, Added::Residual, true});
          const Matrix result = problem.result();
          problem.run(context, result);
          std::vector<double> row = result.values();
          row.resize(1217);
          return row;
        };
        const std::vector<double> alone = first_row(1);
        for (const std::int64_t m : {2, 4, 7, 16}) CHECK(first_row(m) == alone);
      });
}

TEST_CASE("matmul respects strided rows and adds a bias once") {
  for (const Types& types : kTypes)
    for (const bool transposed : {false, true})
      for (const Added added : kAdded)
        check_case(
            {31, 33, 257, types.operand, types.result, transposed, !transposed, added, true, 5});
}

TEST_CASE("rows that are not aligned, in aligned rows of a transposed operand") {
  for (const Types& types : kTypes)
    for (const Added added : kAdded)
      for (const bool bias : {false, true})
        check_case({257, 33, 301, types.operand, types.result, true, false, added, bias, 7});
}

TEST_CASE("large products, which oneDNN computes where it is found, match float64") {
#ifdef TESSERA_ONEDNN
  if (std::getenv("TESSERA_ONEDNN_PLUGIN") != nullptr)  // as in ctest
    CHECK(kernels::product_library().name != "Eigen");
#endif
  for (const Types& types : kTypes)
    for (const bool transpose_a : {false, true})
      for (const bool transpose_b : {false, true})
        for (const Added added : kAdded)
          for (const bool bias : {false, true})
            check_case({103, 33, 211, types.operand, types.result, transpose_a, transpose_b, added,
                        bias, 5});
}

TEST_CASE("contiguous bf16 products of many rows, of which threads compute blocks") {
  for (const DType c : {DType::F32, DType::BF16})
    for (const Added added : kAdded)
      for (const auto& [transpose_a, transpose_b] :
           {std::pair{false, false}, {true, false}, {false, true}})
        check_case({1029, 5, 18, DType::BF16, c, transpose_a, transpose_b, added, true});
}

TEST_CASE("float32 products of which oneDNN gets panels of b, within what is planned") {
  const Size size{97, 1201, 331};
  for (const bool transpose_a : {false, true})
    for (const Added added : kAdded) {
      check_case({size.m, size.k, size.n, DType::F32, DType::F32, transpose_a, true, added,
                  added == Added::Residual, 5});
      // Rows of b, and with a gap those of c, at a multiple of a page.
      check_case({size.m, size.k, 1001, DType::F32, DType::F32, transpose_a, false, added,
                  added == Added::Residual, 23});
    }
  if (gpu_only()) return;
  const Buffer a(DType::F32, {size.m, size.k}, 1.0), b(DType::F32, {size.n, size.k}, 1.0),
      c(DType::F32, {size.m, size.n});
  const auto scratch = [&](Device device) {
    const auto context = Context::create({.device = device, .threads = 2});
    const auto view = [&](const Buffer& of) {
      TensorView of_device = of.view();
      if (device.type == DeviceType::Meta) of_device.data = nullptr;
      of_device.device = device;
      return of_device;
    };
    matmul(*context, {view(a), view(b), view(c), false, true});
    return context->ledger().usage(MemoryCategory::Workspace).peak;
  };
  const std::int64_t taken = scratch({});
  CHECK((taken > 0) == (kernels::product_library().name != "Eigen"));
  CHECK(scratch({DeviceType::Meta, 0}) == taken);
}

#if !defined(__SANITIZE_ADDRESS__)  // which keeps freed memory
TEST_CASE("oneDNN's products find their memory again, whatever is allocated between them") {
  if (kernels::product_library().name == "Eigen") return;
  const auto pages_taken = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
  };
  const auto context = Context::create({.threads = 1});
  const Buffer a(DType::F32, {512, 768}, 1.0), b(DType::F32, {768, 768}, 1.0);
  const Buffer c(DType::F32, {512, 768});
  std::vector<std::unique_ptr<char[]>> small;  // settle in holes of the heap
  small.reserve(1000);
  long before = 0;
  for (int i = 0; i < 34; ++i) {
    if (i == 4) before = pages_taken();
    kernels::matmul(*context, {a.view(), b.view(), c.view()});
    for (std::size_t j = 0; j < 20; ++j) small.push_back(std::make_unique<char[]>(100 + 50 * j));
  }
  CHECK(pages_taken() - before < 300);  // the small ones take 90
}
#endif

TEST_CASE("signals during products leave the heap intact") {
  static volatile std::sig_atomic_t signals = 0;
  const auto before = std::signal(SIGALRM, [](int) { signals = signals + 1; });
  const itimerval often{{0, 200}, {0, 200}}, never{};
  REQUIRE(::setitimer(ITIMER_REAL, &often, nullptr) == 0);
  const auto context = Context::create({.threads = 1});
  for (int i = 0; i < 30; ++i)
    for (const Size& s :
         {Size{192, 32, 96}, Size{192, 128, 32}, Size{103, 33, 211}, Size{512, 576, 576}})
      for (const bool transpose_a : {false, true})
        for (const bool transpose_b : {false, true}) {
          // Memory of their own, so that malloc checks the heap.
          std::vector<float> a(static_cast<std::size_t>(s.m * s.k), 1.0F),
              b(static_cast<std::size_t>(s.k * s.n), 1.0F), c(static_cast<std::size_t>(s.m * s.n));
          const auto view = [](std::vector<float>& of, std::int64_t rows, std::int64_t columns,
                               bool transposed) {
            return dense_view(of.data(), DType::F32,
                              transposed ? Shape{columns, rows} : Shape{rows, columns});
          };
          matmul(*context, {.a = view(a, s.m, s.k, transpose_a),
                            .b = view(b, s.k, s.n, transpose_b),
                            .c = view(c, s.m, s.n, false),
                            .transpose_a = transpose_a,
                            .transpose_b = transpose_b});
          REQUIRE(c.back() == static_cast<float>(s.k));
        }
  REQUIRE(::setitimer(ITIMER_REAL, &never, nullptr) == 0);
  std::signal(SIGALRM, before);
  CHECK(signals > 0);
}

TEST_CASE("matmul sums thousands of terms, and splits rows over threads") {
  for (const Types& types : kTypes) {
    check_case({301, 900, 3, types.operand, types.result});
    for (const Added added : kAdded)
      check_case({5, 4001, 35, types.operand, types.result, added == Added::Result,
                  added == Added::Result, added, true});
  }
}

TEST_CASE("matmul with k = 0 writes the bias or zero, or leaves the accumulator unchanged") {
  for (const Types& types : kTypes)
    for (const Added added : kAdded)
      for (const bool bias : {false, true})
        for (const std::int64_t m : {3, 101})
          check_case({m, 0, 5, types.operand, types.result, false, false, added, bias});
}

TEST_CASE("a product is reproducible bit for bit, and releases scratch of bf16 products") {
  constexpr std::int64_t kM = 97, kK = 1025, kN = 2100;  // more columns than are widened at a time
  for (const DType dtype : kComputingDTypes) {
    const Buffer a(dtype, {kM, kK}, Buffer::normal(kM * kK, 1));
    const Buffer b(dtype, {kK, kN}, Buffer::normal(kK * kN, 2));
    const auto context = Context::create({{}, 2, detect_cpu_level()});
    const Buffer first(dtype, {kM, kN});
    const Buffer second(dtype, {kM, kN});
    matmul(*context, {a.view(), b.view(), first.view()});
    matmul(*context, {a.view(), b.view(), second.view()});
    CHECK(first.bytes() == second.bytes());
    const MemoryUsage scratch = context->ledger().usage(MemoryCategory::Workspace);
    CHECK((scratch.peak > 0) == (dtype == DType::BF16 && !kernels::product_library().has_bf16));
    CHECK(scratch.current == 0);
  }
}

struct LayerCase {
  Size size;
  DType dtype;
  bool transpose_a, transpose_b, bias;
  std::int64_t gap;  // between the rows of the operands
};

/// Calls f for every dtype, with shapes that cuBLASLt's epilogues support and others.
template <typename F>
void for_each_layer(F&& f) {
  constexpr Size kSizes[] = {{1, 1, 1},     {3, 31, 33}, {33, 257, 31}, {257, 3, 1},
                             {31, 33, 257}, {1, 64, 96}, {40, 64, 128}};
  for (const DType dtype : kComputingDTypes)
    for (const Size& size : kSizes)
      for (const bool transpose_a : {false, true})
        for (const bool transpose_b : {false, true})
          f(LayerCase{size, dtype, transpose_a, transpose_b, transpose_a, transpose_b ? 8 : 0});
}

/// Operands of one layer, scaled to sums of size 1; the bias starts at an odd element.
class Layer {
 public:
  explicit Layer(const LayerCase& c)
      : case_(c),
        a_(c.dtype, c.transpose_a ? c.size.k : c.size.m, c.transpose_a ? c.size.m : c.size.k, c.gap,
           Buffer::normal(c.size.m * c.size.k, 1)),
        b_(c.dtype, c.transpose_b ? c.size.n : c.size.k, c.transpose_b ? c.size.k : c.size.n, c.gap,
           Buffer::normal(c.size.k * c.size.n, 2, 1 / std::sqrt(static_cast<double>(c.size.k)))),
        bias_(c.dtype, {c.size.n + 1}, Buffer::normal(c.size.n + 1, 3)) {}

  Shape shape() const { return {case_.size.m, case_.size.n}; }
  std::int64_t count() const { return case_.size.m * case_.size.n; }
  Matmul product(const Buffer& c) const {
    return {a_.view(), b_.view(), c.view(), case_.transpose_a, case_.transpose_b};
  }
  Matmul product_and_bias(const Buffer& c) const {
    Matmul args = product(c);
    if (!case_.bias) return args;
    args.bias = dense_view(static_cast<char*>(bias_.view().data) + dtype_size(case_.dtype),
                           case_.dtype, {case_.size.n}, bias_.view().device);
    return args;
  }

 private:
  LayerCase case_;
  Matrix a_, b_;
  Buffer bias_;
};

/// Checks that all bits are equal; reports the first element that differs.
void check_equal(const Buffer& got, const Buffer& want) {
  const auto got_values = got.values(), want_values = want.values();
  const auto differs = std::mismatch(got_values.begin(), got_values.end(), want_values.begin());
  CAPTURE(differs.first - got_values.begin());
  CAPTURE(differs.first == got_values.end() ? 0.0 : *differs.first);
  CAPTURE(differs.first == got_values.end() ? 0.0 : *differs.second);
  CHECK(got.bytes() == want.bytes());
}

/// On a GPU, the fused GELU may read unrounded sums.
void check_same(const Context& context, const Buffer& got, const Buffer& want, bool may_round) {
  if (may_round && got.view().dtype == DType::BF16)
    check_close(got.values(), want.values(), tolerance(DType::BF16), 4.0);
  else
    check_equal(got, want);
  CHECK(context.ledger().usage(MemoryCategory::Workspace).current == 0);
}

template <typename F>
void for_each_layer_and_context(F&& f) {
  for_each_layer([&](const LayerCase& c) {
    CAPTURE(c.size.m);
    CAPTURE(c.size.k);
    CAPTURE(c.size.n);
    CAPTURE(dtype_name(c.dtype));
    CAPTURE(c.transpose_a);
    CAPTURE(c.transpose_b);
    const auto on_host = [&](Context& context) { f(context, c, false); };
    if (!gpu_only()) {
      for_each_cpu_context(on_host);
      with_plugin(fiber_plugin(), on_host);
    }
    for_gpu_context([&](Context& context) { f(context, c, true); });
  });
}

TEST_CASE("a product with GELU equals the product followed by GELU") {
  for_each_layer_and_context([](Context& context, const LayerCase& c, bool gpu) {
    const Layer layer(c);
    const Buffer want_pre(c.dtype, layer.shape()), want(c.dtype, layer.shape());
    matmul(context, layer.product_and_bias(want_pre));
    kernels::gelu_forward(context, {want_pre.view(), want.view()});

    const Buffer pre(c.dtype, layer.shape(), 7.0), got(c.dtype, layer.shape(), 7.0);
    const Buffer alone(c.dtype, layer.shape(), 7.0);
    for (const bool keeps_pre : {true, false}) {
      Matmul args = layer.product_and_bias(keeps_pre ? got : alone);
      args.epilogue = Epilogue::Gelu;
      if (keeps_pre) args.pre = pre.view();
      matmul(context, args);
    }
    check_same(context, pre, want_pre, gpu);
    check_same(context, got, want, gpu);
    check_same(context, alone, want, gpu);
  });
}

TEST_CASE("a product with GELU's gradient equals the product followed by the gradient") {
  for_each_layer_and_context([](Context& context, const LayerCase& c, bool gpu) {
    const Layer layer(c);
    const Buffer pre(c.dtype, layer.shape(), Buffer::normal(layer.count(), 5, 2.0));
    const Buffer grad(c.dtype, layer.shape()), want(c.dtype, layer.shape());
    matmul(context, layer.product(grad));
    kernels::gelu_backward(context, {pre.view(), grad.view(), want.gradient(false)});

    const Buffer got(c.dtype, layer.shape(), 7.0);
    Matmul args = layer.product(got);
    args.epilogue = Epilogue::GeluGradient;
    args.pre = pre.view();
    matmul(context, args);
    check_same(context, got, want, gpu);
  });
}

}  // namespace
}  // namespace tessera::test
