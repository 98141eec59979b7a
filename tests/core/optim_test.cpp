#include <doctest/doctest.h>

#include <cmath>
#include <numbers>

#include "core/optim/adamw.h"
#include "core/optim/lr_schedule.h"

using namespace tessera;
using optim::LrSchedule;

TEST_CASE("warm-up rises to the learning rate and never starts at zero") {
  const LrSchedule schedule{LrSchedule::Kind::Cosine, 1.0, 0.1, 4, 104};
  CHECK(schedule.at(0) == doctest::Approx(0.2));
  CHECK(schedule.at(3) == doctest::Approx(0.8));
  CHECK(schedule.at(4) == 1.0);
}

TEST_CASE("schedules fall from lr to min_lr with their named shapes") {
  const auto at = [](LrSchedule::Kind kind, std::int64_t step) {
    return LrSchedule{kind, 1.0, 0.1, 0, 100}.at(step);
  };
  CHECK(at(LrSchedule::Kind::Constant, 99) == 1.0);
  CHECK(at(LrSchedule::Kind::Linear, 50) == doctest::Approx(0.55));
  CHECK(at(LrSchedule::Kind::Linear, 100) == doctest::Approx(0.1));
  CHECK(at(LrSchedule::Kind::Cosine, 25) ==
        doctest::Approx(0.1 + 0.45 * (1 + std::cos(std::numbers::pi / 4))));
  CHECK(at(LrSchedule::Kind::Cosine, 1000) == doctest::Approx(0.1));
  CHECK(at(LrSchedule::Kind::Wsd, 80) == doctest::Approx(1.0));
  CHECK(at(LrSchedule::Kind::Wsd, 90) == doctest::Approx(0.55));
  CHECK(at(LrSchedule::Kind::Wsd, 100) == doctest::Approx(0.1));
}

TEST_CASE("a schedule of warm-up only, or without steps, is finite") {
  const LrSchedule warm{LrSchedule::Kind::Cosine, 1.0, 0.0, 10, 10};
  CHECK(warm.at(9) == doctest::Approx(10.0 / 11.0));
  CHECK(warm.at(10) == 1.0);
  CHECK_THROWS_WITH_AS(LrSchedule::parse("step"),
                       "optim.schedule must be constant, cosine, linear or wsd, got 'step'",
                       InvalidArgument);
}

namespace {

// Layout: a (decay, 70) at 0, b (no decay, 3) at 128, c (no decay, a tenth of the rate, 5)
// at 192, d (decay, 64) at 256.
const ShardLayout kLayout(
    "u", {{"a", {7, 10}, true}, {"b", {3}, false}, {"c", {5}, false, 0.1F}, {"d", {8, 8}, true}},
    2);

}  // namespace

TEST_CASE("update ranges are merged, contiguous, and follow the parameters") {
  const ShardLayout same("u", {{"a", {64}, true}, {"b", {3}, true}}, 1);
  CHECK(optim::update_ranges(same, 0, same.padded_size()).size() == 1);
  const auto whole = optim::update_ranges(kLayout, 0, kLayout.padded_size());
  REQUIRE(whole.size() == 4);
  CHECK(whole[0].begin == 0);
  CHECK(whole[0].decay);
  CHECK(whole[0].end == 128);
  CHECK(whole[1].end == 192);
  CHECK_FALSE(whole[1].decay);
  CHECK(whole[2].end == 256);
  CHECK(whole[2].lr_scale == 0.1F);
  CHECK(whole[3].end == kLayout.padded_size());
  CHECK(whole[3].decay);

  const auto second = optim::update_ranges(kLayout, kLayout.segment_size(), kLayout.segment_size());
  REQUIRE(second.size() == 2);
  CHECK(second.front().begin == 0);
  CHECK_FALSE(second.front().decay);
  CHECK(second.back().end == kLayout.segment_size());
  CHECK(optim::update_ranges(kLayout, kLayout.padded_size(), 64).empty());
}

TEST_CASE("a step updates every element by AdamW, with decay only where configured") {
  const auto context = Context::create();
  const std::int64_t n = kLayout.padded_size();
  const auto make = [&](double value) { return Tensor::full(context, {n}, DType::F32, value); };
  const Tensor param = make(2.0);
  const Tensor grad = make(0.5);
  const Tensor exp_avg = make(0.0);
  const Tensor exp_avg_sq = make(0.0);
  const optim::AdamWOptions options{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  optim::AdamW(options).update(
      {.layout = kLayout, .param = param, .grad = grad, .state = {exp_avg, exp_avg_sq}},
      {.lr = 0.01, .step = 1, .factor = Tensor::full(context, {1}, DType::F32, 0.5)});
  // The first update is lr * g / |g|, whatever the gradient's magnitude.
  const auto values = param.to_vector<float>();
  CHECK(values[0] == doctest::Approx(2.0 * (1 - 0.01 * 0.1) - 0.01));
  CHECK(values[128] == doctest::Approx(2.0 - 0.01));
  CHECK(values[200] == doctest::Approx(2.0 - 0.001));
  CHECK(values[300] == doctest::Approx(2.0 * (1 - 0.01 * 0.1) - 0.01));
  CHECK(exp_avg.to_vector<float>()[7] == doctest::Approx(0.1 * 0.25));
  CHECK(exp_avg_sq.to_vector<float>()[7] == doctest::Approx(0.05 * 0.0625));
}

TEST_CASE("adamw refuses invalid arguments by name") {
  const auto context = Context::create();
  const auto make = [&](std::int64_t n, DType dtype = DType::F32) {
    return Tensor::full(context, {n}, dtype, 1.0);
  };
  const auto refuses = [&](const Tensor& param, const Tensor& grad, const Tensor& factor,
                           const Tensor& copy, std::int64_t step, double beta2, const char* what,
                           double eps = 1e-8) {
    CAPTURE(what);
    const auto update = [&] {
      const optim::AdamW adamw({.beta2 = beta2, .eps = eps});
      adamw.update({kLayout, 0, param, grad, {make(4), make(4)}, copy}, {0.01, step, factor});
    };
    CHECK_THROWS_WITH_AS(update(), doctest::Contains(what), InvalidArgument);
  };
  const Tensor good = make(4), one = make(1);
  refuses(good, make(5), one, {}, 1, 0.9, "grad must have shape [4], got [5]");
  refuses(good, make(4, DType::F64), one, {}, 1, 0.9, "grad must have dtype f32, got f64");
  refuses(make(4, DType::F64), good, one, {}, 1, 0.9, "param must have dtype f32, got f64");
  refuses(good, good, good, {}, 1, 0.9, "factor must have shape [1], got [4]");
  refuses(good, good, one, good, 1, 0.9, "copy must have dtype bf16, got f32");
  refuses(make(4, DType::BF16), good, one, make(4, DType::BF16), 1, 0.9, "needs no copy");
  refuses(good, good, one, {}, 0, 0.9, "got 0");
  refuses(good, good, one, {}, 1, 1.0, "beta2");
  refuses(good, good, one, {}, 1, 0.9, "eps", -1.0);
  refuses(good, good, one, make(5, DType::BF16), 1, 0.9, "copy must have shape [4], got [5]");
}
