#include "comm/sharding/sharded_model.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "comm/single.h"
#include "comm/threads.h"
#include "core/autograd/autograd.h"
#include "core/base/rng.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "tests/support/on_threads.h"

using namespace tessera;
using comm::ShardedModel;
using comm::ShardMode;

namespace {

// A chain of square linear layers: a root with one unused parameter, and one unit per layer.
struct Chain {
  std::vector<std::unique_ptr<Parameter>> parameters;
  std::vector<Unit> units;
  std::int64_t width;

  Chain(std::int64_t width_, int layers) : width(width_) {
    add("root", {{"scale", {3}}});
    for (int i = 0; i < layers; ++i) {
      const std::string name = fmt::format("h.{}", i);
      add(name,
          {{name + ".weight", {width, width}}, {name + ".bias", {width}}, {name + ".unused", {2}}});
    }
  }
  void add(const std::string& name, const std::vector<std::pair<std::string, Shape>>& list) {
    Unit unit{name, {}};
    for (const auto& [parameter, shape] : list) {
      parameters.push_back(std::make_unique<Parameter>(
          Parameter{parameter, Tensor::unbound(shape, DType::F32), {}, shape.size() > 1}));
      parameters.back()->tensor.set_requires_grad(true);
      unit.parameters.push_back(parameters.back().get());
    }
    units.push_back(unit);
  }
  Tensor forward(Tensor x, UnitHooks& hooks) {
    hooks.before_forward(0);
    for (int u = 1; u < static_cast<int>(units.size()); ++u) {
      hooks.before_forward(u);
      x = autograd::boundary(x, [&hooks, u] { hooks.after_backward(u); });
      const auto& p = units[static_cast<std::size_t>(u)].parameters;
      x = ops::linear(x, p[0]->tensor, p[1]->tensor);
      x = autograd::boundary(x, [&hooks, u] { hooks.before_backward(u); });
      hooks.after_forward(u);
    }
    return x;
  }
};

void fill(const Parameter& parameter, std::int64_t begin, std::int64_t end, float* out) {
  const auto key =
      RngKey::make(3, RngPurpose::Test, parameter.name.size() * 131 + parameter.name[2]);
  for (std::int64_t i = begin; i < end; ++i)
    out[i - begin] = 0.3F * normal_at(key, static_cast<std::uint64_t>(i));
}

using RankMain = std::function<void(int, const std::shared_ptr<Context>&, comm::Communicator&)>;

void run_ranks(int world, const RankMain& rank_main) {
  auto group = std::make_shared<comm::ThreadGroup>(world);
  test::on_threads(world, [&](int rank) {
    const auto context = Context::create();
    comm::CommunicatorOptions options;
    options.timeout = std::chrono::seconds(20);
    auto communicator = comm::make_threads_communicator(group, rank, options);
    rank_main(rank, context, *communicator);
  });
}

void micro_step(Chain& chain, ShardedModel& sharded, const std::shared_ptr<Context>& context,
                bool first, bool last, double value) {
  sharded.begin_micro_batch(first, last);
  const Tensor x = Tensor::full(context, {2, chain.width}, DType::F32, value);
  const Tensor y = chain.forward(x, sharded);
  autograd::backward(y, Tensor::full(context, {2, chain.width}, DType::F32, 1.0));
  sharded.end_micro_batch();
}

}  // namespace

TEST_CASE(
    "every element has exactly one owner at any world size, even with more ranks than elements") {
  for (const auto mode : {ShardMode::Full, ShardMode::None}) {
    for (const int world : {1, 2, 3, 5, 8}) {
      Chain sizes(7, 2);
      std::map<std::string, std::vector<int>> seen;
      std::mutex mutex;
      run_ranks(world, [&](int, const auto& context, comm::Communicator& communicator) {
        Chain chain(7, 2);
        ShardedModel sharded(chain.units, mode, DType::F32, context, communicator);
        sharded.load(fill);
        const std::lock_guard lock(mutex);
        for (const auto& piece : sharded.owned_pieces()) {
          auto& counts = seen[piece.parameter->name];
          counts.resize(static_cast<std::size_t>(piece.parameter->tensor.numel()));
          std::vector<float> expected(static_cast<std::size_t>(piece.end - piece.begin));
          fill(*piece.parameter, piece.begin, piece.end, expected.data());
          for (std::int64_t i = piece.begin; i < piece.end; ++i) {
            ++counts[static_cast<std::size_t>(i)];
            CHECK(piece.master.template data<float>()[i - piece.begin] ==
                  expected[static_cast<std::size_t>(i - piece.begin)]);
          }
        }
      });
      CHECK(seen.size() == sizes.parameters.size());
      for (const auto& parameter : seen) {
        CAPTURE(parameter.first);
        const auto& counts = parameter.second;
        CHECK(std::all_of(counts.begin(), counts.end(), [](int c) { return c == 1; }));
      }
    }
  }
}

TEST_CASE(
    "gradients are summed over ranks and micro-batches; those of unused parameters are zero") {
  // Reference: one rank processes all inputs.
  const std::vector<double> inputs = {0.5, -1.0, 2.0, 0.25, 1.5, -0.75};
  std::map<std::string, std::vector<float>> expected;
  const auto collect = [](ShardedModel& sharded, std::map<std::string, std::vector<float>>& into) {
    for (const auto& unit : sharded.units()) {
      const auto values = unit->gradient().template to_vector<float>();
      const std::int64_t begin = unit->segment_begin();
      for (const auto& range : unit->layout().ranges(begin, begin + unit->segment_size())) {
        const auto& slot = unit->layout().slots()[static_cast<std::size_t>(range.slot)];
        auto& out = into[slot.name];
        out.resize(static_cast<std::size_t>(slot.numel));
        std::copy(values.begin() + range.offset,
                  values.begin() + range.offset + range.end - range.begin,
                  out.begin() + range.begin);
      }
    }
  };
  {
    const auto context = Context::create();
    auto single = comm::make_single_communicator();
    Chain chain(9, 3);
    ShardedModel sharded(chain.units, ShardMode::Full, DType::F32, context, *single);
    sharded.load(fill);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      micro_step(chain, sharded, context, i == 0, i + 1 == inputs.size(), inputs[i]);
    }
    collect(sharded, expected);
  }
  CHECK(expected.at("h.1.unused") == std::vector<float>{0.0F, 0.0F});
  for (const auto mode : {ShardMode::Full, ShardMode::None}) {
    for (const int world : {2, 3}) {
      std::map<std::string, std::vector<float>> actual;
      std::mutex mutex;
      run_ranks(world, [&](int rank, const auto& context, comm::Communicator& communicator) {
        Chain chain(9, 3);
        ShardedModel sharded(chain.units, mode, DType::F32, context, communicator);
        sharded.load(fill);
        const auto per_rank = inputs.size() / static_cast<std::size_t>(world);
        for (int pass = 0; pass < 2; ++pass) {  // no state may leak into the second step
          for (std::size_t m = 0; m < per_rank; ++m) {
            micro_step(chain, sharded, context, m == 0, m + 1 == per_rank,
                       inputs[static_cast<std::size_t>(rank) * per_rank + m]);
          }
        }
        const Tensor totals = Tensor::full(context, {2}, DType::F64, 1.0);
        sharded.sum_totals(totals);
        const std::vector<double> sums = totals.to_vector<double>();
        const double sum = sums[0];
        CHECK(sums[1] == world);
        const std::lock_guard lock(mutex);
        double reference = 0;
        for (const auto& [name, values] : expected) {
          for (const float v : values) reference += static_cast<double>(v) * static_cast<double>(v);
        }
        CHECK(sum == doctest::Approx(reference).epsilon(1e-5));
        collect(sharded, actual);
      });
      CHECK(actual.size() == expected.size());
      for (const auto& parameter : expected) {
        CAPTURE(parameter.first);
        CAPTURE(world);
        const auto& values = parameter.second;
        for (std::size_t i = 0; i < values.size(); ++i) {
          CHECK(actual.at(parameter.first)[i] == doctest::Approx(values[i]).epsilon(1e-5));
        }
      }
    }
  }
}

TEST_CASE("two ranks each hold half; whole units exist only while they are used") {
  for (const int world : {1, 2, 4}) {
    run_ranks(world, [&](int, const auto& context, comm::Communicator& communicator) {
      Chain chain(64, 6);
      ShardedModel sharded(chain.units, ShardMode::Full, DType::F32, context, communicator);
      sharded.load(fill);
      micro_step(chain, sharded, context, true, true, 0.1);
      sharded.step({}, 1e-3, 1, Tensor::full(context, {1}, DType::F32, 1.0));
      std::int64_t padded = 0;
      for (const auto& unit : sharded.units()) padded += unit->layout().padded_size();
      const std::int64_t unit_bytes = sharded.units()[1]->layout().padded_size() * 4;
      const std::int64_t root_bytes = sharded.units()[0]->layout().padded_size() * 4;
      const MemoryLedger& ledger = context->ledger();
      const auto usage = [&](MemoryCategory c) { return ledger.usage(c); };
      CHECK(usage(MemoryCategory::Parameters).current == padded * 4 / world);
      CHECK(usage(MemoryCategory::OptimizerState).current == padded * 8 / world);
      if (world == 1) {
        CHECK(usage(MemoryCategory::Gathered).peak == 0);
        CHECK(usage(MemoryCategory::Gradients).peak == padded * 4);
        return;
      }
      CHECK(usage(MemoryCategory::Gathered).current == 0);
      CHECK(usage(MemoryCategory::Gradients).current == padded * 4 / world);
      // At most the root and two units are gathered at a time.
      CHECK(usage(MemoryCategory::Gathered).peak <= 2 * unit_bytes + root_bytes);
      CHECK(usage(MemoryCategory::Gradients).peak <=
            padded * 4 / world + 2 * unit_bytes + root_bytes);
    });
  }
}

TEST_CASE("the prefetch distance bounds the gathered units, and does not change the numbers") {
  std::map<int, std::vector<float>> gradients;
  std::mutex mutex;
  for (const int ahead : {0, 1, 2, 100}) {
    run_ranks(2, [&](int rank, const auto& context, comm::Communicator& communicator) {
      Chain chain(64, 6);
      ShardedModel sharded(chain.units, ShardMode::Full, DType::F32, context, communicator, ahead);
      sharded.load(fill);
      micro_step(chain, sharded, context, true, true, 0.1);
      const std::int64_t unit_bytes = sharded.units()[1]->layout().padded_size() * 4;
      const std::int64_t root_bytes = sharded.units()[0]->layout().padded_size() * 4;
      const auto units = static_cast<std::int64_t>(sharded.units().size()) - 1;
      const std::int64_t peak = context->ledger().usage(MemoryCategory::Gathered).peak;
      CHECK(peak <= root_bytes + std::min<std::int64_t>(1 + ahead, units) * unit_bytes);
      CHECK(peak > std::min<std::int64_t>(ahead, units - 1) * unit_bytes);
      if (rank != 0) return;
      const std::lock_guard lock(mutex);
      gradients[ahead] = sharded.units()[3]->gradient().template to_vector<float>();
    });
  }
  for (const auto& [ahead, values] : gradients) CHECK(values == gradients.at(1));
}

TEST_CASE("an ungathered parameter cannot be read by mistake") {
  run_ranks(2, [&](int, const auto& context, comm::Communicator& communicator) {
    Chain chain(8, 2);
    ShardedModel sharded(chain.units, ShardMode::Full, DType::F32, context, communicator);
    sharded.load(fill);
    CHECK_THROWS_AS(chain.units[1].parameters[0]->tensor.view(), InternalError);
    sharded.before_forward(1);
    CHECK(chain.units[1].parameters[0]->tensor.view().data != nullptr);
    sharded.end_evaluation();
    CHECK_THROWS_AS(chain.units[1].parameters[0]->tensor.view(), InternalError);
  });
}

TEST_CASE("if a rank leaves during a step, the others name it") {
  std::atomic<int> informed{0};
  run_ranks(3, [&](int rank, const auto& context, comm::Communicator& communicator) {
    Chain chain(8, 4);
    ShardedModel sharded(chain.units, ShardMode::Full, DType::F32, context, communicator);
    sharded.load(fill);
    micro_step(chain, sharded, context, true, true, 0.1);
    if (rank == 1) {
      sharded.before_forward(0);
      return;  // the others gather units that this rank never gathers
    }
    try {
      micro_step(chain, sharded, context, true, true, 0.1);
      FAIL("a step without rank 1 succeeded");
    } catch (const CommError& error) {
      CAPTURE(std::string(error.what()));
      CHECK(error.culprits() == std::vector<int>{1});
      ++informed;
    }
  });
  CHECK(informed == 2);
}

TEST_CASE("invalid arguments are refused") {
  const auto context = Context::create();
  auto single = comm::make_single_communicator();
  CHECK_THROWS_WITH_AS(ShardedModel({}, ShardMode::Full, DType::F32, context, *single),
                       "a model needs at least one unit", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ShardedModel({Unit{"h.0", {}}}, ShardMode::Full, DType::F32, context, *single),
      "unit 'h.0' has no parameters", InvalidArgument);
  Chain chain(4, 1);
  CHECK_THROWS_AS(ShardedModel(chain.units, ShardMode::Full, DType::F64, context, *single),
                  InvalidArgument);
  CHECK_THROWS_WITH_AS(comm::parse_shard_mode("half"),
                       "shard.mode must be full or none, got 'half'", InvalidArgument);
}
