// Compiles the functions for the baseline level, in a separate namespace.
#define TESSERA_CPU_NAMESPACE baseline_of_the_test
#include "kernels/cpu/vector_math.h"

#include <limits>

#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

namespace math = kernels::cpu::TESSERA_CPU_NAMESPACE;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Every 257th float in [-limit, limit]: all exponents, varied mantissas.
template <typename F>
void for_floats(float limit, F&& f) {
  const auto last = std::bit_cast<std::uint32_t>(limit);
  for (std::uint32_t bits = 0; bits <= last; bits += 257) {
    f(std::bit_cast<float>(bits));
    f(-std::bit_cast<float>(bits));
  }
}

TEST_CASE("exp is within 2e-7 over its range") {
  double worst = 0;
  for_floats(87.0F, [&](float x) {
    const double want = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(math::exp(x)) - want) / want);
  });
  CHECK(worst < 2e-7);
  CHECK(math::exp(0.0F) == 1.0F);
}

TEST_CASE("exp saturates and propagates a NaN") {
  CHECK(std::isnan(math::exp(kNan)));
  CHECK(math::exp(-kInfinity) >= 0.0F);
  CHECK(math::exp(-kInfinity) < 1e-37F);
  CHECK(math::exp(-1e30F) < 1e-37F);
  CHECK(math::exp(kInfinity) > 1e38F);
  CHECK(math::exp(1e30F) > 1e38F);
}

TEST_CASE("bf16 stores round like BFloat16, NaN included") {
  std::int64_t wrong = 0;
  for_floats(kInfinity, [&](float x) {
    BFloat16 stored{};
    math::store(&stored, x);
    wrong += stored.bits != BFloat16(x).bits;
    wrong += std::bit_cast<std::uint32_t>(math::load(&stored)) !=
             static_cast<std::uint32_t>(stored.bits) << 16;
  });
  CHECK(wrong == 0);
  // A NaN with its payload in the dropped half must not become infinity.
  for (const std::uint32_t bits : {0x7f800001U, 0x7fffffffU, 0xffc00000U, 0xff800001U}) {
    BFloat16 stored{};
    math::store(&stored, std::bit_cast<float>(bits));
    CHECK(std::isnan(math::load(&stored)));
  }
}

}  // namespace
}  // namespace tessera::test
