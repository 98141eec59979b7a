#include "kernels/optimizer.h"

#include <cstdint>

#include "kernels/moment_code.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::AdamW;
using kernels::adamw;
using kernels::AdamWRange;
using kernels::sum_of_squares;

struct State {
  explicit State(std::int64_t n)
      : param(DType::F32, {n}, Buffer::normal(n, 1)),
        grad(DType::F32, {n}, Buffer::normal(n, 2)),
        exp_avg(DType::F32, {n}),
        exp_avg_sq(DType::F32, {n}) {}
  AdamW args() const {
    return {.param = param.view(),
            .grad = grad.view(),
            .exp_avg = exp_avg.view(),
            .exp_avg_sq = exp_avg_sq.view(),
            .ranges = {{.end = param.view().numel(), .lr = 1e-2, .weight_decay = 0.1}},
            .beta1 = 0.9,
            .beta2 = 0.95,
            .grad_scale = 0.5};
  }
  Buffer param, grad, exp_avg, exp_avg_sq;
};

TEST_CASE("adamw matches its definition over several steps") {
  for (const std::int64_t n : kOddLengths) {
    for_each_context([&](Context& context) {
      const State state(n);
      auto param = state.param.values(), m = state.exp_avg.values(), v = state.exp_avg_sq.values();
      const auto grad = state.grad.values();
      for (std::int64_t step = 1; step <= 3; ++step) {
        AdamW args = state.args();
        args.step = step;
        adamw(context, args);
        for (std::size_t i = 0; i < param.size(); ++i) {
          const double g = args.grad_scale * grad[i];
          m[i] = args.beta1 * m[i] + (1 - args.beta1) * g;
          v[i] = args.beta2 * v[i] + (1 - args.beta2) * g * g;
          const double t = static_cast<double>(step);
          const double m_hat = m[i] / (1 - std::pow(args.beta1, t));
          const double v_hat = v[i] / (1 - std::pow(args.beta2, t));
          const AdamWRange& range = args.ranges[0];
          param[i] = param[i] * (1 - range.lr * range.weight_decay) -
                     range.lr * m_hat / (std::sqrt(v_hat) + args.eps);
        }
      }
      check_close(state.exp_avg.values(), m, tolerance(DType::F32));
      check_close(state.exp_avg_sq.values(), v, tolerance(DType::F32));
      check_close(state.param.values(), param, tolerance(DType::F32), 0.1);
    });
  }
}

TEST_CASE("adamw does not depend on the number of threads") {
  for (const CpuLevel level : cpu_levels()) {
    const State one(20011), three(20011);
    adamw(*Context::create({{}, 1, level}), one.args());
    adamw(*Context::create({{}, 3, level}), three.args());
    CHECK(one.param.bytes() == three.param.bytes());
    CHECK(one.exp_avg_sq.bytes() == three.exp_avg_sq.bytes());
  }
}

TEST_CASE("adamw only decays a weight whose gradient and moments are zero") {
  const auto context = Context::create();
  const Buffer param(DType::F32, {2}, 2.0), zero(DType::F32, {2}), m(DType::F32, {2}),
      v(DType::F32, {2});
  adamw(*context, {param.view(),
                   zero.view(),
                   m.view(),
                   v.view(),
                   {{.end = 2, .lr = 0.5, .weight_decay = 0.25}}});
  CHECK(param.values() == std::vector<double>(2, 2.0 * 0.875));
}

TEST_CASE("adamw decays only weights that the update makes smaller, if that is asked") {
  for_each_context([](Context& context) {
    const State all(101), shrinking(101), none(101);
    AdamW args = all.args();
    adamw(context, args);
    args = shrinking.args();
    args.decay = kernels::Decay::Shrinking;
    adamw(context, args);
    args = none.args();
    args.ranges[0].weight_decay = 0;
    adamw(context, args);
    const auto start = State(101).param.values(), m = all.exp_avg.values();
    for (std::size_t i = 0; i < start.size(); ++i) {
      const State& like = m[i] * start[i] < 0 ? none : all;
      CHECK(shrinking.param.values()[i] == doctest::Approx(like.param.values()[i]).epsilon(1e-6));
    }
  });
}

TEST_CASE("adamw accepts misaligned ranges") {
  for_each_context([](Context& context) {
    const State whole(34), part(34);
    adamw(context, whole.args());
    AdamW args = part.args();
    for (TensorView* view : {&args.param, &args.grad, &args.exp_avg, &args.exp_avg_sq}) {
      view->data = view->as<float>() + 1;
      view->shape = {33};
    }
    args.ranges[0].end = 33;
    adamw(context, args);
    const auto want = whole.param.values(), got = part.param.values();
    CHECK(got[0] == State(34).param.values()[0]);
    check_close({got.begin() + 1, got.end()}, {want.begin() + 1, want.end()}, tolerance(DType::F32),
                0.1);
  });
}

TEST_CASE("adamw writes a rounded copy, and changes nothing if the factor is NaN") {
  for (const std::int64_t n : kOddLengths) {
    for_each_context([&](Context& context) {
      CAPTURE(n);
      const State plain(n), state(n);
      const Buffer copy(DType::BF16, {n});
      Buffer rounded(DType::BF16, {n});
      Buffer factor(DType::F32, {1});
      AdamW args = plain.args();
      args.grad_scale = 0.125;
      adamw(context, args);
      args = state.args();
      args.factor = factor.view();
      args.copy = copy.view();
      const auto before = state.param.bytes();
      factor.set({std::nan("")});
      adamw(context, args);
      CHECK(state.param.bytes() == before);
      CHECK(copy.values() == std::vector<double>(static_cast<std::size_t>(n), 0.0));
      factor.set({0.25});
      adamw(context, args);
      CHECK(state.param.bytes() == plain.param.bytes());
      CHECK(state.exp_avg_sq.bytes() == plain.exp_avg_sq.bytes());
      rounded.set(state.param.values());
      CHECK(copy.bytes() == rounded.bytes());
    });
  }
}

TEST_CASE("adamw updates a bf16 weight, rounded to nearest or stochastically") {
  for_each_context([](Context& context) {
    constexpr std::int64_t kCount = 4097;
    const Buffer grad(DType::F32, {kCount}, 1.0);
    const auto run = [&](std::uint64_t first_element, bool stochastic) {
      const Buffer param(DType::BF16, {kCount}, 1.0), m(DType::F32, {kCount}),
          v(DType::F32, {kCount});
      AdamW args{param.view(), grad.view(), m.view(), v.view(), {{.end = kCount, .lr = 1e-3}}};
      args.stochastic = stochastic;
      context.set_rng_step({.seed = 7});
      args.rng = context.rng_step();
      args.ranges[0].place = 1;
      args.ranges[0].first_element = first_element;
      adamw(context, args);
      return param.values();
    };
    // The update is 1e-3; bf16 values below 1 are 2^-8 apart.
    CHECK(run(0, false) == std::vector<double>(kCount, 1.0));
    const auto values = run(0, true);
    double sum = 0;
    for (const double value : values) {
      CHECK((value == 1.0 || value == 1.0 - 0x1p-8));
      sum += value;
    }
    CHECK(sum / kCount == doctest::Approx(1.0 - 1e-3).epsilon(1e-4));
    // Rounding uses the element's own random word on every device: 0.999f ends in 0xbe77, and
    // rounds up if the sum carries. Near ties, earlier rounding may decide.
    bool own = true;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto sum_of_bits =
          static_cast<int>(RngKey::make(7, RngPurpose::Rounding, 1, 1).word(i) & 0xffffU) + 0xbe77;
      if (std::abs(sum_of_bits - 0x10000) > 64)
        own &= (values[i] == 1.0) == (sum_of_bits > 0x10000);
    }
    CHECK(own);
    // The random numbers do not depend on where a segment starts.
    const auto shifted = run(3, true);
    CHECK(std::vector<double>(values.begin() + 3, values.end()) ==
          std::vector<double>(shifted.begin(), shifted.end() - 3));
  });
}

TEST_CASE("adamw gives a list of ranges the same bits as each range alone") {
  constexpr std::int64_t kCount = 70000;
  // Aligned for packs or not, with gaps, more than fit into a launch.
  for (const std::int64_t alignment : {64, 1}) {
    std::vector<AdamWRange> ranges;
    for (std::int64_t begin = 0, r = 0; begin < kCount; ++r) {
      const std::int64_t length = r % 7 == 0 ? 3000 : 1 + r * 37 % 400;
      const std::int64_t end = std::min(begin + length, kCount);
      ranges.push_back({.begin = begin,
                        .end = end,
                        .lr = 1e-3 * static_cast<double>(1 + r % 3),
                        .weight_decay = r % 2 == 0 ? 0.1 : 0.0,
                        .place = static_cast<std::uint64_t>(r),
                        .first_element = static_cast<std::uint64_t>(r * 5)});
      begin = (end + 1 + alignment - 1) / alignment * alignment;
    }
    REQUIRE(ranges.size() > 64);
    for_each_context([&](Context& context) {
      CAPTURE(alignment);
      context.set_rng_step({.seed = 7});
      const auto run = [&](DType dtype, bool stochastic, bool with_copy, bool at_once) {
        const Buffer param(dtype, {kCount}, Buffer::normal(kCount, 1)),
            grad(DType::F32, {kCount}, Buffer::normal(kCount, 2)), m(DType::F32, {kCount}),
            v(DType::F32, {kCount}), copy(DType::BF16, {kCount});
        AdamW args{param.view(), grad.view(), m.view(), v.view(), ranges};
        args.stochastic = stochastic;
        args.rng = context.rng_step();
        if (with_copy) args.copy = copy.view();
        if (at_once) {
          adamw(context, args);
        } else {
          const auto whole = args;
          for (AdamWRange range : ranges) {
            const std::int64_t begin = range.begin, length = range.end - begin;
            args.param = whole.param.narrow(0, begin, length);
            args.grad = whole.grad.narrow(0, begin, length);
            args.exp_avg = whole.exp_avg.narrow(0, begin, length);
            args.exp_avg_sq = whole.exp_avg_sq.narrow(0, begin, length);
            if (with_copy) args.copy = whole.copy.narrow(0, begin, length);
            range.begin = 0;
            range.end = length;
            args.ranges = {range};
            adamw(context, args);
          }
        }
        return std::vector{param.bytes(), m.bytes(), v.bytes(), copy.bytes()};
      };
      for (const bool with_copy : {false, true})
        CHECK(run(DType::F32, false, with_copy, true) == run(DType::F32, false, with_copy, false));
      for (const bool stochastic : {false, true})
        CHECK(run(DType::BF16, stochastic, false, true) ==
              run(DType::BF16, stochastic, false, false));
    });
  }
}

TEST_CASE("clip_factor clips the norm, and is NaN for a non-finite total") {
  for_each_context([](Context& context) {
    Buffer totals(DType::F64, {3});
    const Buffer factor(DType::F32, {1});
    const auto clip = [&](double squares, double loss, double max_norm) {
      totals.set({squares, loss, 0.0});
      kernels::clip_factor(context, {totals.view(), factor.view(), max_norm});
      return factor.values()[0];
    };
    CHECK(clip(16.0, 1.0, 1.0) == doctest::Approx(0.25));
    CHECK(clip(0.25, 1.0, 1.0) == 1.0);
    CHECK(clip(0.0, 1.0, 1.0) == 1.0);
    CHECK(clip(16.0, 1.0, 0.0) == 1.0);
    CHECK(std::isnan(clip(std::nan(""), 1.0, 1.0)));
    CHECK(std::isnan(clip(16.0, INFINITY, 0.0)));
  });
  const auto context = Context::create();
  const Buffer totals(DType::F64, {3}), factor(DType::F32, {1});
  CHECK_THROWS_WITH_AS(kernels::clip_factor(*context, {totals.view(), totals.view(), 1.0}),
                       "clip_factor: factor must have dtype f32, got f64", InvalidArgument);
  CHECK_THROWS_WITH_AS(kernels::clip_factor(*context, {totals.view(), factor.view(), -1.0}),
                       "clip_factor: max_norm must not be negative, got -1", InvalidArgument);
}

double sum_on_device(Context& context, const TensorView& x) {
  const Buffer sum(DType::F64, {1}, -1.0);
  sum_of_squares(context, {x, sum.view()});
  return sum.values()[0];
}

TEST_CASE("sum_of_squares is the same for any number of threads") {
  for (const std::int64_t n : {0, 1, 3, 31, 33, 257, 16384, 16385, 50257, 100003}) {
    CAPTURE(n);
    const auto numbers = Buffer::normal(n, 3);
    const Buffer rounded(DType::F32, {n}, numbers);
    double expected = 0;
    for (const double value : rounded.values()) expected += value * value;
    std::vector<double> by_level(4, -1.0);
    for_each_context([&](Context& context) {
      const Buffer x(DType::F32, {n}, numbers);
      const double got = sum_of_squares(context, x.view());
      check_close({got}, {expected}, 1e-13);
      CHECK(sum_on_device(context, x.view()) == got);
      if (context.device().type != DeviceType::CPU) return;
      double& first = by_level[static_cast<std::size_t>(context.cpu_level())];
      if (first < 0) first = got;
      CHECK(got == first);
    });
  }
}

TEST_CASE("sum_of_squares accepts misaligned ranges") {
  for_each_context([](Context& context) {
    const Buffer x(DType::F32, {20000}, 0.5);
    TensorView part = x.view();
    part.data = x.view().as<float>() + 3;
    part.shape = {19990};
    CHECK(sum_of_squares(context, part) == 19990 * 0.25);
  });
}

TEST_CASE("sum_of_squares refuses invalid arguments") {
  const auto context = Context::create();
  const State state(4), other(5);
  const Buffer half(DType::BF16, {4});
  CHECK_THROWS_AS(sum_of_squares(*context, half.view()), InvalidArgument);
  const Buffer pair(DType::F64, {2});
  CHECK_THROWS_WITH_AS(sum_of_squares(*context, {state.param.view(), pair.view()}),
                       "sum_of_squares: sum must have one element, got shape [2]", InvalidArgument);
  CHECK_THROWS_AS(sum_of_squares(*context, {state.param.view(), other.param.view()}),
                  InvalidArgument);
}

struct MuonCase {
  DType param, update;
  bool cautious, with_copy;
  std::int64_t shift;  // elements: not aligned for packs
};
constexpr MuonCase kMuonCases[] = {{DType::F32, DType::F32, false, false, 0},
                                   {DType::F32, DType::F32, true, true, 1},
                                   {DType::F32, DType::BF16, true, true, 0},
                                   {DType::BF16, DType::BF16, false, false, 1},
                                   {DType::BF16, DType::F32, true, false, 0}};

TEST_CASE("the parts of a Muon step match their definitions, and do nothing if the factor is NaN") {
  for (const MuonCase& c : kMuonCases)
    for (const std::int64_t n : kOddLengths)
      for_each_context([&](Context& context) {
        const std::int64_t all = n + c.shift;
        const auto make = [&](DType dtype, int seed) {
          return Buffer(dtype, {all}, Buffer::normal(all, seed));
        };
        const auto part = [&](const Buffer& of) { return of.view().narrow(0, c.shift, n); };
        const Buffer grad = make(DType::F32, 1), momentum = make(DType::F32, 2),
                     param = make(c.param, 3), out = make(c.update, 4), copy = make(DType::BF16, 5),
                     sum(DType::F64, {1}, Buffer::normal(1, 6));
        Buffer factor(DType::F32, {1});
        kernels::WeightUpdate update{
            .param = part(param),
            .update = part(out),
            .factor = factor.view(),
            .copy = c.with_copy ? part(copy) : TensorView{},
            .lr = 0.5,
            .weight_decay = 0.25,
            .rate = 0.125,
            .decay = c.cautious ? kernels::Decay::Shrinking : kernels::Decay::All};
        const kernels::MuonMomentum first{part(grad), part(momentum), part(out), factor.view(),
                                          0.75};
        const auto m_before = momentum.values(), w_before = param.values(), g = grad.values();

        factor.set({std::nan("")});
        kernels::muon_momentum(context, first);
        kernels::weight_update(context, update);
        CHECK(momentum.values() == m_before);
        CHECK(param.values() == w_before);

        factor.set({0.5});
        kernels::muon_momentum(context, first);
        auto m = m_before, w = w_before, o = out.values(), rounded = copy.values();
        const auto before = o;
        for (auto i = static_cast<std::size_t>(c.shift); i < m.size(); ++i) {
          m[i] = 0.75 * m[i] + 0.25 * 0.5 * g[i];
          o[i] = 0.75 * m[i] + 0.25 * 0.5 * g[i];
        }
        check_close(momentum.values(), m, tolerance(DType::F32), 4.0);
        check_close(out.values(), o, tolerance(c.update), 4.0);

        kernels::weight_update(context, update);
        const auto u = out.values();
        for (auto i = static_cast<std::size_t>(c.shift); i < w.size(); ++i) {
          const double decay = c.cautious && u[i] * w[i] < 0 ? 1.0 : 0.875;
          w[i] = decay * w[i] - 0.125 * u[i];
          if (c.with_copy) rounded[i] = w[i];
        }
        check_close(param.values(), w, tolerance(c.param), 4.0);
        check_close(copy.values(), rounded, tolerance(DType::BF16), 4.0);

        const Buffer squares(DType::F64, {1}, 16.0);
        kernels::normalize(context, {part(grad), squares.view(), part(out)});
        auto scaled = u;
        for (auto i = static_cast<std::size_t>(c.shift); i < u.size(); ++i) scaled[i] = g[i] / 4;
        check_close(out.values(), scaled, tolerance(c.update), 4.0);
      });
}

TEST_CASE("a moving average follows the weights, and does nothing if the factor is NaN") {
  for (const DType dtype : {DType::F32, DType::BF16})
    for (const std::int64_t n : kOddLengths)
      for (const std::int64_t shift : {0, 1})
        for_each_context([&](Context& context) {
          const std::int64_t all = n + shift;
          const Buffer param(dtype, {all}, Buffer::normal(all, 1)),
              average(DType::F32, {all}, Buffer::normal(all, 2));
          Buffer factor(DType::F32, {1}, {std::nan("")});
          const kernels::MovingAverage args{param.view().narrow(0, shift, n),
                                            average.view().narrow(0, shift, n), factor.view(),
                                            0.75};
          auto expected = average.values();
          kernels::moving_average(context, args);
          CHECK(average.values() == expected);

          factor.set({0.5});
          kernels::moving_average(context, args);
          const auto w = param.values();
          for (auto i = static_cast<std::size_t>(shift); i < w.size(); ++i)
            expected[i] = 0.75 * expected[i] + 0.25 * w[i];
          check_close(average.values(), expected, tolerance(DType::F32), 4.0);
        });
}

TEST_CASE("codes of moments round to one of the two nearest, and on average to the value") {
  for (const double x : {0.0, 1e-6, 1e-3, 0.1, 0.5, 0.99, 1.0}) {
    CAPTURE(x);
    const auto value = static_cast<float>(x);
    double first = 0, second = 0;
    constexpr int kDraws = 4096;
    for (int i = 0; i < kDraws; ++i) {
      const float random = (static_cast<float>(i) + 0.5F) / kDraws;
      const int code = kernels::encode_first(-value, std::sqrt(value), random);
      CHECK((code <= 0 && code >= -127));
      first += static_cast<double>(kernels::decode_first(code)) / kDraws;
      second += static_cast<double>(kernels::decode_second(
                    kernels::encode_second(value, std::sqrt(std::sqrt(value)), random))) /
                kDraws;
    }
    CHECK(std::abs(first + x) < 1e-6 + 1e-3 * x);
    CHECK(std::abs(second - x) < 1e-6 + 1e-3 * x);
  }
  CHECK(kernels::encode_second(1e-12F, 1e-3F, 0.99F) == 1);  // never 0
  for (int code = -127; code <= 127; ++code) {
    const float x = kernels::decode_first(code);
    CHECK(std::abs(kernels::encode_first(x, std::sqrt(std::abs(x)), 0.5F) - code) == 0);
  }
}

TEST_CASE("adamw in 8 bits updates as adamw does, and keeps its moments within a code") {
  for (const DType dtype : {DType::F32, DType::BF16})
    for (const std::int64_t n : {1, 63, 64, 65, 1000, 50257})
      for_each_context([&](Context& context) {
        CAPTURE(n);
        constexpr std::int64_t kBegin = 128;  // other elements do not change
        const std::int64_t all = kBegin + (n + 63) / 64 * 64 + 64, blocks = all / 64;
        const auto start = Buffer::normal(all, 1);
        const Buffer grad(DType::F32, {all}, Buffer::normal(all, 2)), m(DType::F32, {all}),
            v(DType::F32, {all}), copy(DType::BF16, {all}), m_scale(DType::F32, {blocks}),
            v_scale(DType::F32, {blocks}), param(dtype, {all}, start),
            expected(dtype, {all}, start);
        // Bytes, in buffers of floats.
        const Buffer m_bytes(DType::F32, {all / 4}), v_bytes(DType::F32, {all / 4});
        const auto as = [&](const Buffer& bytes, DType type) {
          TensorView view = bytes.view();
          view.dtype = type;
          view.shape = {all};
          return view;
        };
        const auto before = param.values();
        for (std::int64_t step = 1; step <= 2; ++step) {
          const AdamW plain{
              .param = expected.view(),
              .grad = grad.view(),
              .exp_avg = m.view(),
              .exp_avg_sq = v.view(),
              .ranges = {{.begin = kBegin, .end = kBegin + n, .lr = 1e-2, .place = 7}},
              .beta1 = 0.9,
              .beta2 = 0.95,
              .step = step};
          adamw(context, plain);
          kernels::AdamW8bit args{plain, m_scale.view(), v_scale.view()};
          args.step.param = param.view();
          args.step.exp_avg = as(m_bytes, DType::I8);
          args.step.exp_avg_sq = as(v_bytes, DType::U8);
          if (dtype == DType::F32) args.step.copy = copy.view();
          kernels::adamw_8bit(context, args);
        }
        const auto got = param.values(), want = expected.values(), exact = m.values(),
                   exact_sq = v.values(), scale = m_scale.values(), scale_sq = v_scale.values(),
                   rounded = copy.values();
        const auto codes = m_bytes.bytes(), codes_sq = v_bytes.bytes();
        double difference = 0;  // on average
        for (std::int64_t i = 0; i < all; ++i) {
          const auto at = static_cast<std::size_t>(i), block = static_cast<std::size_t>(i / 64);
          if (i < kBegin || i >= kBegin + n) {
            REQUIRE(got[at] == before[at]);
            continue;
          }
          // An update is about the rate, whatever the moments are.
          REQUIRE(std::abs(got[at] - want[at]) < 3e-2);
          difference += std::abs(got[at] - want[at]) / static_cast<double>(n);
          if (dtype == DType::F32) REQUIRE(std::abs(rounded[at] - got[at]) < 2e-2);
          const auto first = kernels::decode_first(static_cast<signed char>(codes[at]));
          const auto second = kernels::decode_second(static_cast<unsigned char>(codes_sq[at]));
          REQUIRE(std::abs(static_cast<double>(first) * scale[block] - exact[at]) <
                  0.04 * scale[block]);
          REQUIRE(std::abs(static_cast<double>(second) * scale_sq[block] - exact_sq[at]) <
                  0.04 * scale_sq[block]);
        }
        CHECK(difference < (dtype == DType::F32 ? 2e-4 : 2e-3));
      });
}

}  // namespace
}  // namespace tessera::test
