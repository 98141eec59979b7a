#include "kernels/dropout.h"

#include <cmath>

#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

const RngKey kKey = RngKey::make(42, RngPurpose::Dropout, 3, 1);

// x[0] uses draw `first` of kKey.
void drop(Context& context, const TensorView& x, const GradientView& y, float p,
          std::uint64_t first) {
  context.set_rng_step({.seed = 42, .step = 3, .first_sample = first});
  kernels::dropout(context, {x, y, p, context.rng_step(), 1, 1});
}

bool kept(std::uint64_t element, float p) { return uniform_from_bits(kKey.word(element)) >= p; }

TEST_CASE("dropout keeps and scales elements as its stream determines") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const bool accumulate : {false, true}) {
        for (const std::int64_t n : kOddLengths) {
          for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{5}, std::uint64_t{6},
                                            std::uint64_t{7}, std::uint64_t{1} << 44}) {
            if (n > 50000 && first != 5) continue;
            CAPTURE(dtype_name(dtype));
            CAPTURE(accumulate);
            CAPTURE(n);
            CAPTURE(first);
            const float p = 0.3F;
            const Buffer x(dtype, {n}, Buffer::normal(n, 1));
            const Buffer y(dtype, {n}, 2.0);
            drop(context, x.view(), y.gradient(accumulate), p, first);
            auto want = x.values();
            for (std::size_t i = 0; i < want.size(); ++i) {
              want[i] = kept(first + i, p) ? want[i] / (1.0 - static_cast<double>(p)) : 0.0;
              if (accumulate) want[i] += 2.0;
            }
            check_close(y.values(), want, tolerance(dtype), accumulate ? 1.0 : 0.0);
          }
        }
      }
    }
  });
}

TEST_CASE("dropout keeps an element whose draw equals the probability") {
  for_each_context([](Context& context) {
    for (std::uint64_t element = 0; element < 8; ++element) {
      const float draw = uniform_from_bits(kKey.word(element));
      for (const float p : {std::nextafter(draw, 0.0F), draw, std::nextafter(draw, 1.0F)}) {
        const Buffer x(DType::F32, {8}, 1.0), y(DType::F32, {8});
        drop(context, x.view(), y.gradient(false), p, 0);
        for (std::uint64_t i = 0; i < 8; ++i) CHECK((y.values()[i] > 0.0) == kept(i, p));
        CHECK((y.values()[element] > 0.0) == (p <= draw));
      }
    }
  });
}

TEST_CASE("dropout draws the same mask for any split, on all devices") {
  constexpr std::int64_t kSize = 60013;
  const auto values = Buffer::normal(kSize, 2);
  std::vector<char> whole;
  for_each_context([&](Context& context) {
    const Buffer x(DType::F32, {kSize}, values);
    const Buffer y(DType::F32, {kSize});
    drop(context, x.view(), y.gradient(false), 0.1F, 17);
    if (whole.empty()) whole = y.bytes();
    CHECK(y.bytes() == whole);
    const Buffer parts(DType::F32, {kSize});
    const std::int64_t cuts[] = {0, 1, 4, 1023, 20000, 20003, kSize};
    for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
      const auto part = [&](const Buffer& buffer) {
        return dense_view(buffer.view().as<float>() + cuts[i], DType::F32, {cuts[i + 1] - cuts[i]},
                          context.device());
      };
      drop(context, part(x), {part(parts), false, true}, 0.1F,
           17 + static_cast<std::uint64_t>(cuts[i]));
    }
    CHECK(parts.bytes() == whole);
  });
}

TEST_CASE("dropout keeps a fraction 1 - p, and the mean") {
  const auto context = Context::create();
  constexpr std::int64_t kSize = 100000;
  const Buffer ones(DType::F32, {kSize}, 1.0);
  const Buffer y(DType::F32, {kSize});
  for (const float p : {0.1F, 0.5F, 0.9F}) {
    drop(*context, ones.view(), y.gradient(false), p, 0);
    const auto values = y.values();
    const auto zeros = static_cast<double>(std::count(values.begin(), values.end(), 0.0));
    const double q = static_cast<double>(p);
    const double deviation = std::sqrt(q * (1.0 - q) * static_cast<double>(kSize));
    CHECK(std::abs(zeros - q * static_cast<double>(kSize)) < 4.0 * deviation);
    CHECK(*std::max_element(values.begin(), values.end()) ==
          doctest::Approx(1.0 / (1.0 - q)).epsilon(1e-6));
  }
}

}  // namespace
}  // namespace tessera::test
