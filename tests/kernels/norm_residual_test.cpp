// Norms that add a residual first: what an addition and a norm of its result give.
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

/// Results of a norm of x + residual, fused or in two steps.
struct Results {
  Results(DType dtype, std::int64_t rows, std::int64_t width)
      : sum(dtype, {rows, width}, 77.0),
        y(dtype, {rows, width}, 77.0),
        mean(accumulator(dtype), {rows}),
        rstd(accumulator(dtype), {rows}) {}
  static DType accumulator(DType dtype) { return dtype == DType::F64 ? DType::F64 : DType::F32; }

  Buffer sum, y, mean, rstd;
};

struct Case {
  Case(DType dtype, std::int64_t rows, std::int64_t width)
      : x(dtype, {rows, width}, Buffer::normal(rows * width, 1, 2.0, 0.5)),
        residual(dtype, {rows, width}, Buffer::normal(rows * width, 2, 1.5)),
        weight(dtype, {width}, Buffer::normal(width, 3)),
        bias(dtype, {width}, Buffer::normal(width, 4)),
        fused(dtype, rows, width),
        separate(dtype, rows, width) {}

  void run_layer_norm(Context& context) const {
    kernels::LayerNormForward args{x.view(),       weight.view(),     bias.view(),
                                   fused.y.view(), fused.mean.view(), fused.rstd.view(),
                                   1e-5,           residual.view(),   fused.sum.view()};
    kernels::layer_norm_forward(context, args);
    kernels::add(context, x.view(), residual.view(), separate.sum.view());
    kernels::layer_norm_forward(context,
                                {separate.sum.view(), weight.view(), bias.view(), separate.y.view(),
                                 separate.mean.view(), separate.rstd.view(), 1e-5});
  }
  void run_rms_norm(Context& context) const {
    kernels::rms_norm_forward(context, {x.view(), weight.view(), fused.y.view(), fused.rstd.view(),
                                        1e-5, residual.view(), fused.sum.view()});
    kernels::add(context, x.view(), residual.view(), separate.sum.view());
    kernels::rms_norm_forward(context, {separate.sum.view(), weight.view(), separate.y.view(),
                                        separate.rstd.view(), 1e-5});
  }
  void check_equal() const {
    CHECK(fused.sum.bytes() == separate.sum.bytes());
    CHECK(fused.y.bytes() == separate.y.bytes());
    CHECK(fused.mean.bytes() == separate.mean.bytes());
    CHECK(fused.rstd.bytes() == separate.rstd.bytes());
  }

  Buffer x, residual, weight, bias;
  Results fused, separate;
};

TEST_CASE("a norm with a residual equals addition and norm, bit for bit") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      // Packs kept by a warp, by a block and read again; single elements.
      for (const std::int64_t width : {1, 3, 31, 33, 257, 768, 1600, 2304, 8200, 1030, 50257}) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(width);
        const std::int64_t rows = width < 50000 ? 3 : 1;
        const Case layer(dtype, rows, width), rms(dtype, rows, width);
        layer.run_layer_norm(context);
        layer.check_equal();
        rms.run_rms_norm(context);
        rms.check_equal();
        CHECK(layer.fused.sum.bytes() == rms.fused.sum.bytes());
        CHECK(layer.fused.y.bytes() != rms.fused.y.bytes());
      }
    }
  });
}

TEST_CASE("the sum of a norm with a residual may take the place of x or the residual") {
  for_each_context([](Context& context) {
    for (const std::int64_t width : {64, 33, 8200}) {
      CAPTURE(width);
      const Case apart(DType::F32, 2, width), over_x(DType::F32, 2, width),
          over_residual(DType::F32, 2, width);
      apart.run_layer_norm(context);
      for (const Case* in_place : {&over_x, &over_residual}) {
        const Buffer& sum = in_place == &over_x ? in_place->x : in_place->residual;
        kernels::layer_norm_forward(
            context, {in_place->x.view(), in_place->weight.view(), in_place->bias.view(),
                      in_place->fused.y.view(), in_place->fused.mean.view(),
                      in_place->fused.rstd.view(), 1e-5, in_place->residual.view(), sum.view()});
        CHECK(sum.bytes() == apart.fused.sum.bytes());
        CHECK(in_place->fused.y.bytes() == apart.fused.y.bytes());
      }
    }
  });
}

TEST_CASE("a norm refuses a residual without a place for the sum, and shapes that do not fit") {
  const auto context = Context::create();
  const Buffer x(DType::F32, {4, 3}), weight(DType::F32, {3}), wide(DType::F32, {4, 4});
  CHECK_THROWS_WITH_AS(kernels::rms_norm_forward(
                           *context, {x.view(), weight.view(), x.view(), {}, 1e-5, x.view(), {}}),
                       "rms_norm_forward: residual and sum go together, only residual is given",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::layer_norm_forward(
          *context, {x.view(), weight.view(), weight.view(), x.view(), {}, {}, 1e-5, {}, x.view()}),
      "layer_norm_forward: residual and sum go together, only sum is given", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::rms_norm_forward(
          *context, {x.view(), weight.view(), x.view(), {}, 1e-5, wide.view(), x.view()}),
      "rms_norm_forward: residual must have shape [4, 3], got [4, 4]", InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
