// All gradients of a norm at once: the CUDA kernels make them in one pass where rows allow it, and
// in two elsewhere. The CPU's kernels in float64 say what is right.
#include <array>
#include <cstdlib>

#include "kernels/norm.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using Values = std::vector<double>;

DType sums_of(DType dtype) { return dtype == DType::F64 ? DType::F64 : DType::F32; }

Values rounded(DType dtype, const Values& values) {
  return Buffer(dtype, {static_cast<std::int64_t>(values.size())}, values).values();
}

/// What the backward of a norm takes, as the dtype holds it; layer norm's, or RMS norm's.
struct Inputs {
  Inputs(bool is_layer, DType type, std::int64_t row_count, std::int64_t columns, bool add)
      : layer(is_layer),
        accumulate(add),
        dtype(type),
        rows(row_count),
        width(columns),
        x(rounded(dtype, Buffer::normal(rows * width, 1, 2.0, 0.5))),
        weight(rounded(dtype, Buffer::normal(width, 2))),
        grad_y(rounded(dtype, Buffer::normal(rows * width, 3))),
        mean(rounded(sums_of(dtype), Buffer::normal(rows, 4, 0.1, 0.5))),
        rstd(rounded(sums_of(dtype), Buffer::normal(rows, 5, 0.05, 0.5))) {}

  const bool layer, accumulate;
  const DType dtype;
  const std::int64_t rows, width;
  const Values x, weight, grad_y, mean, rstd;
};

/// Gradients of x, weight and bias.
struct Results {
  std::array<Values, 3> values;
  std::array<std::vector<char>, 3> bytes;
  std::int64_t scratch = 0;
};

/// @param apart  the gradient of x alone, then those of the parameters
Results run(Context& context, const Inputs& in, DType dtype, bool apart = false) {
  const DType sums = sums_of(dtype);
  const Buffer x(dtype, {in.rows, in.width}, in.x), weight(dtype, {in.width}, in.weight);
  const Buffer grad_y(dtype, {in.rows, in.width}, in.grad_y);
  const Buffer mean(sums, {in.rows}, in.mean), rstd(sums, {in.rows}, in.rstd);
  const Buffer grad_x(dtype, {in.rows, in.width}, 0.5);
  const Buffer grad_weight(sums, {in.width}, 0.5), grad_bias(sums, {in.width}, 0.5);
  context.ledger().reset_peaks();
  const auto backward = [&](bool input, bool parameters) {
    const auto gradient = [&](const Buffer& of, bool wanted) {
      return wanted ? of.gradient(in.accumulate) : GradientView{};
    };
    if (in.layer)
      kernels::layer_norm_backward(
          context, {x.view(), weight.view(), mean.view(), rstd.view(), grad_y.view(),
                    gradient(grad_x, input), gradient(grad_weight, parameters),
                    gradient(grad_bias, parameters)});
    else
      kernels::rms_norm_backward(
          context, {x.view(), weight.view(), rstd.view(), grad_y.view(), gradient(grad_x, input),
                    gradient(grad_weight, parameters)});
  };
  if (apart) backward(true, false);
  backward(!apart, true);
  const MemoryUsage scratch = context.ledger().usage(MemoryCategory::Workspace);
  CHECK(scratch.current == 0);
  return {{grad_x.values(), grad_weight.values(), grad_bias.values()},
          {grad_x.bytes(), grad_weight.bytes(), grad_bias.bytes()},
          scratch.peak};
}

void check_results(const Results& got, const Results& want, DType dtype) {
  check_close(got.values[0], want.values[0], tolerance(dtype), 3.0);
  for (const std::size_t k : {1U, 2U})
    check_close(got.values[k], want.values[k], tolerance(sums_of(dtype)), 30.0);
}

/// Fibers, and a GPU where there is one.
template <typename F>
void for_each_cuda_context(F&& f) {
  if (!gpu_only()) with_plugin(TESSERA_FIBER_PLUGIN, f);
  for_gpu_context(f);
}

template <typename F>
void for_each_norm(F&& f) {
  for (const DType dtype : kComputingDTypes) {
    for (const bool layer : {true, false}) {
      for (const bool accumulate : {false, true}) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(layer);
        CAPTURE(accumulate);
        f(layer, dtype, accumulate);
      }
    }
  }
}

struct Size {
  std::int64_t rows, width;
};

// On fibers 4 blocks run at once, so each walks over several rows; the last step is not full. Teams
// of 1 to 16 warps with 1 to 4 packs to a thread, whole and not; and what takes two passes.
constexpr Size kSizes[] = {{1, 8},    {75, 64},  {70, 768}, {33, 1032}, {19, 1600},
                           {9, 2304}, {9, 4096}, {5, 8192}, {3, 16384}, {75, 31},
                           {75, 33},  {20, 257}, {75, 3},   {75, 1},    {5, 1030}};

TEST_CASE("all gradients of a norm at once are the CPU's, for any width") {
  const auto cpu = Context::create();
  for_each_norm([&](bool layer, DType dtype, bool accumulate) {
    for (const Size size : kSizes) {
      CAPTURE(size.rows);
      CAPTURE(size.width);
      const Inputs inputs(layer, dtype, size.rows, size.width, accumulate);
      const Results want = run(*cpu, inputs, DType::F64);
      for_each_cuda_context([&](Context& context) {
        const Results got = run(context, inputs, dtype);
        check_results(got, want, dtype);
        if (!layer) CHECK(got.values[2] == Values(static_cast<std::size_t>(size.width), 0.5));
      });
    }
  });
}

TEST_CASE("gradients of a norm repeat to the bit") {
  for_each_cuda_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      const Inputs inputs(true, dtype, 150, 264, true);
      const Results first = run(context, inputs, dtype);
      for (int i = 0; i < 3; ++i) CHECK(run(context, inputs, dtype).bytes == first.bytes);
    }
  });
}

TEST_CASE("gradients of a norm that are asked for apart are those of one pass") {
  for_each_cuda_context([](Context& context) {
    for_each_norm([&](bool layer, DType dtype, bool accumulate) {
      const Inputs inputs(layer, dtype, 21, 1600, accumulate);
      check_results(run(context, inputs, dtype, true), run(context, inputs, dtype), dtype);
    });
  });
}

TEST_CASE("scratch of a norm's gradients is a sum for each block and column, and is booked") {
  if (gpu_only()) return;
  with_plugin(TESSERA_FIBER_PLUGIN, [](Context& context) {
    constexpr std::int64_t kTogether = 4;  // of fibers
    const auto scratch = [&](bool layer, std::int64_t rows, std::int64_t width) {
      return run(context, Inputs(layer, DType::BF16, rows, width, false), DType::BF16).scratch;
    };
    CHECK(scratch(true, 100, 768) == kTogether * 2 * 768 * 4);
    CHECK(scratch(false, 100, 768) == kTogether * 768 * 4);
    CHECK(scratch(true, 9, 768) == 2 * 2 * 768 * 4);  // 8 rows to a block
    CHECK(scratch(true, 9, 8192) == kTogether * 2 * 8192 * 4);
    CHECK(scratch(true, 9, 16384) == kTogether / 2 * 2 * 16384 * 4);  // twice as many threads
    CHECK(scratch(true, 9, 257) == 0);  // two passes, and few rows: one block for each column
  });
}

TEST_CASE("a device with little shared memory makes a norm's gradients in two passes") {
  if (gpu_only()) return;
  const auto cpu = Context::create();
  const Inputs inputs(true, DType::BF16, 19, 1600, true);
  const Results want = run(*cpu, inputs, DType::F64);
  REQUIRE(::setenv("TESSERA_FIBER_SHARED", "49152", 1) == 0);
  with_plugin(TESSERA_FIBER_PLUGIN, [&](Context& context) {
    const Results got = run(context, inputs, DType::BF16);
    check_results(got, want, DType::BF16);
    CHECK(got.scratch == 0);
  });
  REQUIRE(::unsetenv("TESSERA_FIBER_SHARED") == 0);
}

}  // namespace
}  // namespace tessera::test
