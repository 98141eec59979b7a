#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include "core/optim/adamw.h"
#include "core/optim/adamw8bit.h"
#include "core/optim/lr_schedule.h"
#include "core/optim/moving_average.h"
#include "core/optim/muon.h"
#include "kernels/elementwise.h"

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

namespace {

using Doubles = std::vector<double>;

// C = A B for A [m, k], B [k, n].
Doubles product(const Doubles& a, const Doubles& b, std::size_t m, std::size_t k, std::size_t n) {
  Doubles c(m * n);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t p = 0; p < k; ++p)
      for (std::size_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + p] * b[p * n + j];
  return c;
}

Doubles transpose(const Doubles& a, std::size_t m, std::size_t n) {
  Doubles t(m * n);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t j = 0; j < n; ++j) t[j * m + i] = a[i * n + j];
  return t;
}

// The iteration as published, in f64.
Doubles newton_schulz(Doubles x, std::size_t m, std::size_t n) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  for (double& v : x) v /= std::sqrt(sum);
  for (int step = 0; step < 5; ++step) {
    const Doubles gram = product(x, transpose(x, m, n), m, n, m);
    const Doubles square = product(gram, gram, m, m, m);
    Doubles b(gram.size());
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = -4.7750 * gram[i] + 2.0315 * square[i];
    const Doubles more = product(b, x, m, m, n);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + more[i];
  }
  return x;
}

}  // namespace

TEST_CASE("a step updates matrices by Muon, and the other parameters by AdamW") {
  const ShardLayout layout(
      "u",
      {{.name = "wide", .shape = {6, 20}, .decay = true, .is_matrix = true},
       {.name = "bias", .shape = {20}},
       {.name = "table", .shape = {9, 4}, .decay = true, .lr_scale = 0.5F},
       {.name = "tall", .shape = {30, 7}, .lr_scale = 2.0F, .is_matrix = true}},
      1);
  const auto context = Context::create();
  const std::int64_t n = layout.padded_size();
  std::vector<float> start(static_cast<std::size_t>(n)), gradient(start.size());
  for (const ParameterSlot& slot : layout.slots())
    for (std::int64_t i = slot.offset; i < slot.offset + slot.numel; ++i) {
      start[static_cast<std::size_t>(i)] = std::cos(static_cast<float>(i));
      gradient[static_cast<std::size_t>(i)] = std::sin(static_cast<float>(i * i % 97));
    }
  const auto tensor = [&](const std::vector<float>& values) {
    return Tensor::from<float>(context, {static_cast<std::int64_t>(values.size())}, values);
  };
  const optim::MuonOptions options{.momentum = 0.9, .adamw = {.weight_decay = 0.25}};
  const optim::Muon muon(options);
  optim::Segment segment{.layout = layout, .param = tensor(start), .grad = tensor(gradient)};
  optim::Segment other{.layout = layout, .param = tensor(start), .grad = tensor(gradient)};
  for (std::size_t i = 0; i < 3; ++i) {
    const optim::StatePlaces places(muon, i, layout, 0, n);
    CHECK(places.size == (i == 0 ? 128 + 256 : 64 + 64));
    segment.state.push_back(Tensor::full(context, {places.size}, DType::F32, 0.0));
  }
  for (int i = 0; i < 2; ++i) other.state.push_back(Tensor::full(context, {n}, DType::F32, 0.0));
  const Tensor factor = Tensor::full(context, {1}, DType::F32, 0.5);
  Doubles expected(start.begin(), start.end()), momentum(start.size());
  for (std::int64_t step = 1; step <= 2; ++step) {
    muon.update(segment, {.lr = 0.01, .step = step, .factor = factor});
    optim::AdamW(options.adamw).update(other, {.lr = 0.01, .step = step, .factor = factor});
    for (const ParameterSlot& slot : layout.slots()) {
      if (!slot.is_matrix) continue;
      const auto rows = static_cast<std::size_t>(slot.shape[0]),
                 columns = static_cast<std::size_t>(slot.shape[1]),
                 first = static_cast<std::size_t>(slot.offset);
      Doubles update(rows * columns);
      for (std::size_t i = 0; i < update.size(); ++i) {
        const double g = 0.1 * 0.5 * static_cast<double>(gradient[first + i]);
        momentum[first + i] = 0.9 * momentum[first + i] + g;
        update[i] = 0.9 * momentum[first + i] + g;
      }
      const bool is_tall = rows > columns;
      update = is_tall ? transpose(newton_schulz(transpose(update, rows, columns), columns, rows),
                                   columns, rows)
                       : newton_schulz(update, rows, columns);
      const double lr = 0.01 * static_cast<double>(slot.lr_scale);
      const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)));
      for (std::size_t i = 0; i < update.size(); ++i) {
        double& w = expected[first + i];
        w = w * (1 - (slot.decay ? lr * 0.25 : 0.0)) - lr * scale * update[i];
      }
    }
  }
  const auto got = segment.param.to_vector<float>(), by_adamw = other.param.to_vector<float>();
  for (const ParameterSlot& slot : layout.slots())
    for (auto i = static_cast<std::size_t>(slot.offset);
         i < static_cast<std::size_t>(slot.offset + slot.numel); ++i) {
      if (slot.is_matrix)
        CHECK(static_cast<double>(got[i]) == doctest::Approx(expected[i]).epsilon(1e-4));
      else
        CHECK(got[i] == by_adamw[i]);
    }

  const auto before = segment.param.to_vector<float>();
  muon.update(
      segment,
      {.lr = 0.01, .step = 3, .factor = Tensor::full(context, {1}, DType::F32, std::nan(""))});
  CHECK(segment.param.to_vector<float>() == before);
  CHECK_THROWS_WITH_AS(optim::Muon({.momentum = 1.0}), doctest::Contains("momentum must be in"),
                       InvalidArgument);
}

namespace {

// Bytes of weights and states after two steps, by parameter, where each of `world` ranks updates its
// segment.
std::vector<std::vector<float>> updated_by(const optim::Optimizer& optimizer, int world,
                                           DType master, DType compute) {
  const ShardLayout layout("u",
                           {{.name = "wide", .shape = {5, 33}, .decay = true, .is_matrix = true},
                            {.name = "one", .shape = {1}},
                            {.name = "odd", .shape = {63}},
                            {.name = "tall", .shape = {65, 7}, .decay = true, .is_matrix = true},
                            {.name = "table", .shape = {13, 11}, .decay = true}},
                           world);
  const auto context = Context::create({.threads = 1});
  context->set_rng_step({.seed = 3});
  const std::int64_t n = layout.segment_size();
  const auto values = [&](int rank, auto of) {
    std::vector<float> all(static_cast<std::size_t>(n));
    for (const SlotRange& range : layout.ranges_of_rank(rank))
      for (std::int64_t i = range.begin; i < range.end; ++i)
        all[static_cast<std::size_t>(range.offset + i - range.begin)] =
            of(static_cast<float>(100 * range.slot + i));
    return Tensor::from<float>(context, {n}, all);
  };
  std::vector<optim::Segment> segments;
  const std::size_t states = optimizer.state_names().size();
  std::vector<std::vector<optim::StatePlaces>> places(static_cast<std::size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    const Tensor start = values(rank, [](float x) { return std::cos(x); });
    Tensor param = Tensor::empty(context, {n}, master, MemoryCategory::Parameters, "param");
    kernels::cast(*context, start.view(), {param.view(), false, true});
    optim::Segment& segment = segments.emplace_back(optim::Segment{
        .layout = layout, .first = rank * n, .param = param, .grad = values(rank, [](float x) {
                                                               return std::sin(x * x);
                                                             })});
    segment.compute = compute;
    for (std::size_t i = 0; i < states; ++i) {
      const auto [dtype, block, starts_as_param] = optimizer.state_kind(i);
      const auto& at =
          places[static_cast<std::size_t>(rank)].emplace_back(optimizer, i, layout, rank * n, n);
      const auto bytes = static_cast<std::int64_t>(dtype_size(dtype)) * at.size / block;
      segment.state.push_back(
          Tensor::window(Tensor::full(context, {bytes / 4}, DType::F32, 0.0).storage(), 0,
                         {at.size / block}, dtype));
    }
  }
  for (std::int64_t step = 1; step <= 2; ++step) {
    const optim::UpdateOptions options{0.01, step, Tensor::full(context, {1}, DType::F32, 0.5)};
    std::vector<unsigned char> gathered;
    for (const bool is_trial : {true, false}) {  // the first finds out what ranks would send
      for (int rank = 0; rank < world; ++rank) {
        optim::Segment segment = segments[static_cast<std::size_t>(rank)];
        const auto copied = [&](const Tensor& t) {
          const Tensor copy =
              Tensor::full(context, {static_cast<std::int64_t>(t.bytes()) / 4}, DType::F32, 0.0);
          std::memcpy(copy.view().data, t.view().data, t.bytes());
          return Tensor::window(copy.storage(), 0, t.shape(), t.dtype());
        };
        if (is_trial) {
          segment.param = copied(segment.param);
          for (Tensor& state : segment.state) state = copied(state);
        }
        if (world > 1)
          segment.gather = [&](const Tensor& whole) {
            auto* const data = static_cast<unsigned char*>(whole.view().data);
            gathered.resize(whole.bytes());
            const std::size_t part = whole.bytes() / static_cast<std::size_t>(world);
            const auto first = part * static_cast<std::size_t>(rank);
            if (is_trial)
              std::memcpy(gathered.data() + first, data + first, part);
            else
              std::memcpy(data, gathered.data(), whole.bytes());
          };
        optimizer.update(segment, options);
      }
    }
  }
  std::vector<std::vector<float>> result(layout.slots().size() * (states + 1));
  const auto append = [&](std::size_t list, const Tensor& t, std::int64_t begin,
                          std::int64_t count) {
    const auto* const data = static_cast<const unsigned char*>(t.view().data);
    const std::size_t size = dtype_size(t.dtype());
    for (std::int64_t i = begin; i < begin + count; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, data + static_cast<std::size_t>(i) * size, size);
      result[list].push_back(static_cast<float>(bits));
    }
  };
  for (int rank = 0; rank < world; ++rank) {
    const auto ranges = layout.ranges_of_rank(rank);
    for (std::size_t r = 0; r < ranges.size(); ++r) {
      const auto slot = static_cast<std::size_t>(ranges[r].slot);
      const std::int64_t length = ranges[r].end - ranges[r].begin;
      const optim::Segment& segment = segments[static_cast<std::size_t>(rank)];
      append(slot * (states + 1), segment.param, ranges[r].offset, length);
      for (std::size_t i = 0; i < states; ++i) {
        const std::int64_t first = places[static_cast<std::size_t>(rank)][i].first[r];
        const std::int64_t block = optimizer.state_kind(i).block;
        if (first >= 0)
          append(slot * (states + 1) + i + 1, segment.state[i], first / block,
                 (length + block - 1) / block);
      }
    }
  }
  return result;
}

}  // namespace

TEST_CASE("from the same gradients optimizers compute the same bits however a model is sharded") {
  const optim::AdamW adamw;
  const optim::AdamW8bit adamw8bit({.decay = kernels::Decay::Shrinking});
  const optim::Muon muon;
  const optim::MovingAverage with_average(std::make_shared<optim::Muon>(), 0.75);
  for (const optim::Optimizer* optimizer : {static_cast<const optim::Optimizer*>(&adamw),
                                            static_cast<const optim::Optimizer*>(&adamw8bit),
                                            static_cast<const optim::Optimizer*>(&muon),
                                            static_cast<const optim::Optimizer*>(&with_average)})
    for (const auto& [master, compute] :
         {std::pair(DType::F32, DType::F32), std::pair(DType::F32, DType::BF16),
          std::pair(DType::BF16, DType::BF16)}) {
      CAPTURE(optimizer->state_names().size());
      const auto expected = updated_by(*optimizer, 1, master, compute);
      for (const int world : {2, 3, 5}) {
        CAPTURE(world);
        const bool same = updated_by(*optimizer, world, master, compute) == expected;
        CHECK(same);
      }
    }
}
