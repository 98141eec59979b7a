#include "kernels/rotary.h"

#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::Rotary;

kernels::RotaryAngles angles_of(std::int64_t dims, double base = 1e4) {
  kernels::RotaryAngles angles;
  angles.pairs = static_cast<int>(dims / 2);
  for (int i = 0; i < angles.pairs; ++i)
    angles.step[static_cast<std::size_t>(i)] = std::pow(base, -2.0 * i / static_cast<double>(dims));
  return angles;
}

/// Reference in long double on dense [B, T, H, D].
std::vector<double> reference(const Rotary& args, const Shape& shape,
                              const std::vector<double>& x) {
  const std::int64_t times = shape[1], heads = shape[2], dim = shape[3];
  const std::int64_t half = args.angles.pairs;
  std::vector<double> y = x;
  for (std::int64_t row = 0; row < shape[0] * times * heads; ++row) {
    if (row % heads >= heads - args.copied_heads) continue;
    const auto position = static_cast<long double>(args.first_position + row / heads % times);
    for (std::int64_t i = 0; i < half; ++i) {
      const long double step = args.angles.step[static_cast<std::size_t>(i)];
      const long double angle = (args.inverse ? -1.0L : 1.0L) * position * step;
      const long double cosine = args.angles.factor * std::cos(angle);
      const long double sine = args.angles.factor * std::sin(angle);
      const auto low = static_cast<std::size_t>(row * dim + i);
      const auto high = low + static_cast<std::size_t>(half);
      y[low] = static_cast<double>(x[low] * cosine - x[high] * sine);
      y[high] = static_cast<double>(x[high] * cosine + x[low] * sine);
    }
  }
  return y;
}

TEST_CASE("rotary matches float64 in both directions, overwriting or accumulating") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t dim : {2, 6, 30, 32, 62, 64, 66, 258, 512}) {
        for (const bool inverse : {false, true}) {
          for (const bool accumulate : {false, true}) {
            CAPTURE(dtype_name(dtype));
            CAPTURE(dim);
            CAPTURE(inverse);
            CAPTURE(accumulate);
            const Shape shape{2, 3, 3, dim};
            const Buffer x(dtype, shape, Buffer::normal(numel(shape), 1)), y(dtype, shape, 0.5);
            Rotary args{.x = x.view(),
                        .y = y.gradient(accumulate),
                        .angles = angles_of(dim),
                        .first_position = 5,
                        .inverse = inverse,
                        .copied_heads = dim == 32 ? 1 : 0};
            if (dim == 64) {  // a part of a head, backwards, and longer
              args.angles = angles_of(48);
              args.angles.factor = 1.25;
              for (double& step : args.angles.step) step = -step;
            }
            kernels::rotary(context, args);
            auto want = reference(args, shape, x.values());
            if (accumulate)
              for (double& value : want) value += 0.5;
            check_close(y.values(), want, tolerance(dtype), 2.0);
          }
        }
      }
    }
  });
}

TEST_CASE("rotary accepts a vocabulary's size of pairs per token") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      CAPTURE(dtype_name(dtype));
      const Shape shape{1, 1, 1733, 58};
      REQUIRE(numel(shape) == 2 * 50257);
      const Buffer x(dtype, shape, Buffer::normal(numel(shape), 1)), y(dtype, shape);
      const Rotary args{
          .x = x.view(), .y = y.gradient(false), .angles = angles_of(58), .first_position = 5};
      kernels::rotary(context, args);
      check_close(y.values(), reference(args, shape, x.values()), tolerance(dtype), 2.0);
    }
  });
}

TEST_CASE("rotary is accurate at large positions") {
  for_each_context([](Context& context) {
    for (const DType dtype : {DType::F32, DType::F64}) {
      for (const double base : {10000.0, 500000.0}) {
        for (const std::int64_t position : {100000, 1000003, 2147483645}) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(base);
          CAPTURE(position);
          const Shape shape{1, 2, 1, 128};
          const Buffer x(dtype, shape, 1.0), y(dtype, shape);
          const Rotary args{.x = x.view(),
                            .y = y.gradient(false),
                            .angles = angles_of(128, base),
                            .first_position = position};
          kernels::rotary(context, args);
          // f64's error of the angle, besides the rounding of the result.
          const double angle_error = 4e-16 * static_cast<double>(position);
          const double rounding = dtype == DType::F32 ? 4e-7 : 1e-14;
          check_close(y.values(), reference(args, shape, x.values()), rounding + angle_error, 1.0);
        }
      }
    }
  });
}

TEST_CASE("rotary works in place on heads of a packed buffer, and changes nothing else") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t dim : {32, 6}) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(dim);
        // [B, T, heads, D]: 4 query, 2 key and 2 value heads, and a gap after each token.
        const std::int64_t batch = 2, times = 3, heads = 8, row = heads * dim + 16;
        const Buffer packed(dtype, {batch, times, row}, Buffer::normal(batch * times * row, 1));
        const auto before = packed.values();
        TensorView keys = offset(packed.view(), 4 * dim);
        keys.shape = {batch, times, 2, dim};
        keys.strides = {times * row, row, dim, 1};
        kernels::rotary(
            context,
            {.x = keys, .y = {keys, false, true}, .angles = angles_of(dim), .first_position = 9});

        const auto after = packed.values();
        auto want = before;
        for (std::int64_t token = 0; token < batch * times; ++token) {
          const auto first = static_cast<std::size_t>(token * row + 4 * dim);
          const std::vector<double> in(
              before.begin() + static_cast<std::ptrdiff_t>(first),
              before.begin() + static_cast<std::ptrdiff_t>(first) + 2 * dim);
          const auto rotated = reference(
              {.x = {}, .y = {}, .angles = angles_of(dim), .first_position = 9 + token % times},
              {1, 1, 2, dim}, in);
          std::copy(rotated.begin(), rotated.end(),
                    want.begin() + static_cast<std::ptrdiff_t>(first));
        }
        check_close(after, want, tolerance(dtype), 2.0);
        for (std::size_t i = 0; i < after.size(); ++i) {
          const auto column = static_cast<std::int64_t>(i) % row;
          if (column < 4 * dim || column >= 6 * dim) CHECK(after[i] == before[i]);
        }
      }
    }
  });
}

TEST_CASE("rotary depends neither on the number of threads nor on where a row begins") {
  const Shape shape{3, 70, 4, 64};
  const Buffer x(DType::F32, shape, Buffer::normal(numel(shape), 1));
  check_same_for_any_threads([&](Context& context) {
    const Buffer y(DType::F32, shape);
    kernels::rotary(context, {.x = x.view(), .y = y.gradient(false), .angles = angles_of(64)});
    return y.bytes();
  });
  for_each_context([&](Context& context) {
    // Token 40 alone, at its position, as in cached decoding.
    const Buffer all(DType::F32, shape, x.values()), whole(DType::F32, shape);
    const Buffer one(DType::F32, {3, 1, 4, 64});
    kernels::rotary(context,
                    {.x = all.view(), .y = whole.gradient(false), .angles = angles_of(64)});
    TensorView token = offset(all.view(), 40 * 4 * 64);
    token.shape = {3, 1, 4, 64};
    kernels::rotary(
        context,
        {.x = token, .y = one.gradient(false), .angles = angles_of(64), .first_position = 40});
    const auto of_all = whole.values(), of_one = one.values();
    for (std::size_t b = 0; b < 3; ++b)
      for (std::size_t i = 0; i < 256; ++i)
        CHECK(of_one[b * 256 + i] == of_all[(b * 70 + 40) * 256 + i]);
  });
}

}  // namespace
}  // namespace tessera::test
