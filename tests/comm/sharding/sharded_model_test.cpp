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
#include "core/base/memory.h"
#include "core/base/rng.h"
#include "core/nn/layers.h"
#include "core/ops/activation.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/unary.h"
#include "core/ops/view.h"
#include "core/optim/adamw.h"
#include "tests/support/check_throws.h"
#include "tests/support/gradcheck.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using comm::ShardedModel;

namespace {

struct Layer : nn::Module {
  Parameter weight, bias, unused;
  Layer(nn::Module& parent, std::string_view name, std::int64_t width)
      : Module(parent, name),
        weight(*this, "weight", {width, width}, {}),
        bias(*this, "bias", {width}, {}),
        unused(*this, "unused", {2}, {}) {}
  Tensor operator()(const Tensor& x) const { return ops::linear(x, weight, bias); }
};

// A chain of square linear layers, one unit each, and a unit of one unused parameter.
struct Chain : nn::Module {
  std::int64_t width;
  Parameter scale;
  nn::List<Layer> h;
  Chain(std::int64_t width_, int layers)
      : width(width_), scale(*this, "scale", {3}, {}), h(*this, "h", layers, width) {}
  Tensor operator()(Tensor x) {
    for (Layer& layer : h) x = nn::unit(layer, x);
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
  const Tensor y = chain(x);
  autograd::backward(y, Tensor::full(context, {2, chain.width}, DType::F32, 1.0));
  sharded.end_micro_batch();
}

}  // namespace

TEST_CASE(
    "every element has exactly one owner at any world size, even with more ranks than elements") {
  for (const std::string mode : {"full", "gradients", "optimizer", "none", "hybrid"}) {
    for (const int world : {1, 2, 3, 5, 8}) {
      if (mode == "hybrid" && world != 8) continue;
      Chain sizes(7, 2);
      std::map<std::string, std::vector<int>> seen;
      std::mutex mutex;
      run_ranks(world, [&](int, const auto& context, comm::Communicator& communicator) {
        Chain chain(7, 2);
        const comm::Mesh mesh = test::mesh_of(mode, communicator);
        ShardedModel sharded(chain, mesh, test::spec_of(mode), context);
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
      CHECK(seen.size() == sizes.parameters().size());
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
    const comm::Mesh mesh(*single);
    ShardedModel sharded(chain, mesh, {}, context);
    sharded.load(fill);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      micro_step(chain, sharded, context, i == 0, i + 1 == inputs.size(), inputs[i]);
    }
    collect(sharded, expected);
  }
  CHECK(expected.at("h.1.unused") == std::vector<float>{0.0F, 0.0F});
  for (const std::string mode : {"full", "gradients", "optimizer", "none"}) {
    for (const int world : {2, 3}) {
      std::map<std::string, std::vector<float>> actual;
      std::mutex mutex;
      run_ranks(world, [&](int rank, const auto& context, comm::Communicator& communicator) {
        Chain chain(9, 3);
        const comm::Mesh mesh = test::mesh_of(mode, communicator);
        ShardedModel sharded(chain, mesh, test::spec_of(mode), context);
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
      const comm::Mesh mesh(communicator);
      ShardedModel sharded(chain, mesh, {}, context);
      sharded.load(fill);
      micro_step(chain, sharded, context, true, true, 0.1);
      sharded.step(optim::AdamW(), {1e-3, 1, Tensor::full(context, {1}, DType::F32, 1.0)});
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
      CHECK(usage(MemoryCategory::Gradients).current == 0);
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
      const comm::Mesh mesh(communicator);
      ShardedModel sharded(chain, mesh, {.gather_ahead = ahead}, context);
      sharded.load(fill);
      const auto peak = [&] { return context->ledger().usage(MemoryCategory::Gathered).peak; };
      const std::int64_t unit_bytes = sharded.units()[1]->layout().padded_size() * 4;
      micro_step(chain, sharded, context, true, true, 0.1);
      CHECK(peak() == unit_bytes);  // the first step learns the order
      micro_step(chain, sharded, context, true, true, 0.1);
      CHECK(peak() == std::min(1 + ahead, 6) * unit_bytes);
      if (rank != 0) return;
      const std::lock_guard lock(mutex);
      gradients[ahead] = sharded.units()[3]->gradient().template to_vector<float>();
    });
  }
  for (const auto& [ahead, values] : gradients) CHECK(values == gradients.at(1));
}

TEST_CASE(
    "a step that another one follows gathers its first units, and does not change the numbers") {
  std::map<bool, std::vector<float>> weights;
  std::mutex mutex;
  for (const bool another_follows : {false, true}) {
    run_ranks(2, [&](int rank, const auto& context, comm::Communicator& communicator) {
      Chain chain(64, 4);
      const comm::Mesh mesh(communicator);
      ShardedModel sharded(chain, mesh, {.gather_ahead = 1}, context);
      sharded.load(fill);
      const optim::AdamW adamw;
      const auto gathered = [&] {
        std::vector<std::string> names;
        for (const auto& unit : sharded.units())
          if (unit->state() != comm::FlatUnit::State::Sharded) names.push_back(unit->name());
        return names;
      };
      for (int step = 1; step <= 3; ++step) {
        micro_step(chain, sharded, context, true, true, 0.1 * step);
        CHECK(gathered().empty());
        sharded.step(
            adamw, {.lr = 0.1, .step = step, .factor = Tensor::full(context, {1}, DType::F32, 1.0)},
            another_follows);
        CHECK(gathered() == (another_follows ? std::vector<std::string>{"h.0", "h.1"}
                                             : std::vector<std::string>{}));
      }
      sharded.release();
      CHECK(gathered().empty());
      if (rank != 0) return;
      const std::lock_guard lock(mutex);
      weights[another_follows] = sharded.units()[1]->master().template to_vector<float>();
    });
  }
  CHECK(weights.at(true) == weights.at(false));
}

TEST_CASE("fewer units being reduced take less memory, and do not change the numbers") {
  std::map<int, std::vector<float>> gradients;
  std::map<int, std::int64_t> peaks;
  std::mutex mutex;
  for (const int behind : {0, 1, 2, 100}) {
    run_ranks(2, [&](int rank, const auto& context, comm::Communicator& communicator) {
      Chain chain(64, 6);
      const comm::Mesh mesh(communicator);
      ShardedModel sharded(chain, mesh, {.reduce_behind = behind}, context);
      sharded.load(fill);
      micro_step(chain, sharded, context, true, true, 0.1);
      if (rank != 0) return;
      const std::lock_guard lock(mutex);
      gradients[behind] = sharded.units()[3]->gradient().template to_vector<float>();
      peaks[behind] = context->ledger().usage(MemoryCategory::Gradients).peak;
    });
  }
  for (const auto& [behind, values] : gradients) CHECK(values == gradients.at(1));
  const std::int64_t unit_bytes = 64 * 64 * 4;
  CHECK(peaks.at(1) >= peaks.at(0) + unit_bytes / 2);
  CHECK(peaks.at(2) >= peaks.at(1) + unit_bytes / 2);
}

TEST_CASE("a parameter can be read within a unit only, or while the whole model is gathered") {
  run_ranks(2, [&](int, const auto& context, comm::Communicator& communicator) {
    Chain chain(8, 2);
    const comm::Mesh mesh(communicator);
    ShardedModel sharded(chain, mesh, {}, context);
    sharded.load(fill);
    const NoGradGuard no_grad(*context);
    const Tensor x = Tensor::full(context, {2, 8}, DType::F32, 1.0);
    CHECK_THROWS_WITH_AS(
        chain.h[0](x), doctest::Contains("a parameter of unit 'h.0' was read outside of nn::unit"),
        InvalidArgument);
    const std::vector<float> y = chain(x).template to_vector<float>();
    CHECK_THROWS_AS(chain.h[1].weight.tensor.view(), InvalidArgument);
    sharded.gather_all();
    CHECK(chain.h[1](chain.h[0](x)).template to_vector<float>() == y);
    CHECK(chain(x).template to_vector<float>() == y);
    CHECK(chain.h[0].weight.tensor.view().data != nullptr);
    sharded.end_evaluation();
    CHECK_THROWS_AS(chain.h[1].weight.tensor.view(), InvalidArgument);
    CHECK(context->ledger().usage(MemoryCategory::Gathered).current == 0);
  });
}

namespace {

// Runs the first layer twice, nests the second in the third, which returns both results, skips the
// last one and the second's result at odd steps, and recomputes where asked for.
struct Tangle : nn::Module {
  nn::List<Layer> h{*this, "h", 4, 8};
  Tensor operator()(const Tensor& x, bool skip) {
    Tensor y = nn::unit(h[0], x);
    const Tensor side = nn::unit(h[0], y);
    const auto [both, inner] = nn::unit(
        {&h[2], &h[1]},
        [this](const Tensor& in) {
          const Tensor second = nn::unit(h[1], in);
          return std::pair(h[2](second), second);
        },
        y);
    y = ops::add(both, side);
    return skip ? y : nn::unit(h[3], ops::add(y, inner));
  }
};

std::map<std::string, std::vector<float>> tangle_gradients(int world, const std::string& mode,
                                                           nn::Recompute recompute) {
  std::map<std::string, std::vector<float>> result;
  std::mutex mutex;
  run_ranks(world, [&](int rank, const auto& context, comm::Communicator& communicator) {
    Tangle model;
    model.set_recompute(recompute);
    const comm::Mesh mesh = test::mesh_of(mode, communicator);
    ShardedModel sharded(model, mesh, test::spec_of(mode), context);
    sharded.load(fill);
    for (int step = 0; step < 4; ++step) {
      for (int m = 0; m < 2; ++m) {
        sharded.begin_micro_batch(m == 0, m == 1);
        const Tensor x = Tensor::full(context, {12 / world, 8}, DType::F32, m == 0 ? 0.5 : -0.25);
        const Tensor y = model(x, step % 2 == 1);
        autograd::backward(y, Tensor::full(context, y.shape(), DType::F32, 1.0));
        sharded.end_micro_batch();
      }
      const std::lock_guard lock(mutex);
      if (world > 1 && mode == "full")
        CHECK(context->ledger().usage(MemoryCategory::Gathered).current == 0);
      for (const auto& unit : sharded.units()) {
        auto& values = result[fmt::format("{} {}", step, unit->name())];
        values.resize(static_cast<std::size_t>(unit->layout().parameter_count()));
        const auto part = unit->gradient().template to_vector<float>();
        for (const auto& range : unit->layout().ranges(
                 unit->segment_begin(), unit->segment_begin() + unit->segment_size())) {
          std::int64_t before = 0;  // elements of earlier parameters
          for (int s = 0; s < range.slot; ++s)
            before += unit->layout().slots()[static_cast<std::size_t>(s)].numel;
          std::copy(part.begin() + range.offset,
                    part.begin() + range.offset + range.end - range.begin,
                    values.begin() + before + range.begin);
        }
      }
    }
    (void)rank;
  });
  return result;
}

}  // namespace

TEST_CASE("units may be shared, nested, recomputed, and skipped at some steps") {
  const auto expected = tangle_gradients(1, "full", nn::Recompute::None);
  CHECK(expected.at("1 h.3") == std::vector<float>(8 * 8 + 8 + 2, 0.0F));
  CHECK(expected.at("0 h.3") != expected.at("1 h.3"));
  CHECK(expected.at("0 h.0") == expected.at("2 h.0"));
  CHECK(tangle_gradients(1, "full", nn::Recompute::Block) == expected);
  for (const int world : {2, 3, 4}) {
    for (const std::string mode : {"full", "gradients", "optimizer", "none", "hybrid"}) {
      if (mode == "hybrid" && world != 4) continue;
      const auto sharded = tangle_gradients(world, mode, nn::Recompute::None);
      CHECK(tangle_gradients(world, mode, nn::Recompute::Block) == sharded);
      for (const auto& [name, values] : expected)
        for (std::size_t i = 0; i < values.size(); ++i)
          CHECK(sharded.at(name)[i] == doctest::Approx(values[i]).epsilon(1e-5));
    }
  }
}

namespace {

// Two blocks that run one shared layer, which they do not list.
struct Sharing : nn::Module {
  Layer shared{*this, "shared", 4};
  nn::List<Layer> h{*this, "h", 2, 4};
  Tensor operator()(Tensor x) {
    for (Layer& layer : h)
      x = nn::unit(
          {&layer}, [&](const Tensor& in) { return layer(nn::unit(shared, in)); }, x);
    return x;
  }
};

std::vector<float> gradients_of_sharing(nn::Recompute recompute) {
  const auto context = Context::create();
  auto single = comm::make_single_communicator();
  const comm::Mesh mesh(*single);
  Sharing model;
  model.set_recompute(recompute);
  ShardedModel sharded(model, mesh, {}, context);
  sharded.load(fill);
  sharded.begin_micro_batch(true, true);
  const Tensor y = model(Tensor::full(context, {2, 4}, DType::F32, 0.5));
  autograd::backward(y, Tensor::full(context, {2, 4}, DType::F32, 1.0));
  sharded.end_micro_batch();
  return sharded.units().front()->gradient().to_vector<float>();
}

}  // namespace

TEST_CASE("recomputed units may run a shared unit that they do not list") {
  CHECK(gradients_of_sharing(nn::Recompute::Block) == gradients_of_sharing(nn::Recompute::None));
}

TEST_CASE("cheap results are computed again in their unit alone, and with the same bits") {
  // Norms are units of their own, so that their weights are sharded while the next unit runs backward.
  struct Normed : nn::Module {
    nn::Norm first{*this, "first", 8, {}};
    nn::Linear middle{*this, "middle", {8, 8}};
    nn::Norm norm{*this, "norm", 8, {}}, side{*this, "side", 8, {}};
    nn::Linear last{*this, "last", {8, 8}};
    Tensor operator()(const Tensor& x) {
      const auto inside = [this](const Tensor& in) {
        captured = side(in);
        return norm(ops::gelu(middle(ops::silu(in))));
      };
      const Tensor y = nn::unit({&middle, &norm, &side}, inside, nn::unit(first, x));
      const auto outside = [this](const Tensor& in) { return ops::mul(last(in), captured); };
      return nn::unit({&last}, outside, y);
    }
    Tensor captured;
  };
  const auto run = [](int world, nn::Recompute recompute) {
    std::vector<float> gradients;
    std::int64_t kept = 0;
    run_ranks(world, [&](int rank, const auto& context, comm::Communicator& communicator) {
      Normed model;
      model.set_recompute(recompute);
      const comm::Mesh mesh(communicator);
      ShardedModel sharded(
          model, mesh, {.units = nn::parse_unit_policy("first,middle,norm,side,last")}, context);
      sharded.load(fill);
      sharded.begin_micro_batch(true, true);
      const Tensor x = test::random_tensor(context, {4, 8}, DType::F32, 3);
      const auto activations = [&] {
        return context->ledger().usage(MemoryCategory::Activations).current;
      };
      const std::int64_t before = activations();
      const Tensor y = model(x);
      if (rank == 0) kept = activations() - before;
      autograd::backward(y, test::random_tensor(context, {4, 8}, DType::F32, 4));
      sharded.end_micro_batch();
      if (rank > 0) return;
      for (const auto& unit : sharded.units())
        for (const float g : unit->gradient().template to_vector<float>()) gradients.push_back(g);
    });
    return std::pair(gradients, kept);
  };
  for (const int world : {1, 2}) {
    CAPTURE(world);
    const auto [all, most] = run(world, nn::Recompute::None);
    const auto [again, least] = run(world, nn::Recompute::Cheap);
    CHECK(again == all);
    CHECK(most - least == 2 * 4 * 8 * 4);  // results of silu and gelu
  }
}

TEST_CASE("frozen parameters have no gradients, no moments and no decay, on any number of ranks") {
  for (const int world : {1, 2}) {
    run_ranks(world, [&](int, const auto& context, comm::Communicator& communicator) {
      Chain chain(8, 3);
      chain.set_recompute(nn::Recompute::Block);
      for (Parameter* p : chain.h[0].parameters()) p->tensor.set_requires_grad(false);
      chain.h[1].weight.tensor.set_requires_grad(false);
      const comm::Mesh mesh(communicator);
      ShardedModel sharded(chain, mesh, {}, context);
      sharded.load(fill);
      std::int64_t trainable = 0;
      for (const auto& unit : sharded.units())
        trainable += unit->is_trainable() ? unit->segment_size() : 0;
      const optim::AdamW adamw({.weight_decay = 0.5});
      const MemoryLedger& ledger = context->ledger();
      for (int step = 1; step <= 2; ++step) {
        micro_step(chain, sharded, context, true, true, 0.5);
        CHECK(ledger.usage(MemoryCategory::Gradients).current == 4 * trainable);
        sharded.step(adamw, {0.1, step, Tensor::full(context, {1}, DType::F32, 1.0)});
      }
      CHECK(ledger.usage(MemoryCategory::OptimizerState).current == 8 * trainable);
      for (const auto& piece : sharded.held_pieces()) {
        std::vector<float> before(static_cast<std::size_t>(piece.end - piece.begin));
        fill(*piece.parameter, piece.begin, piece.end, before.data());
        const bool frozen = !piece.parameter->tensor.requires_grad();
        CAPTURE(piece.parameter->name);
        if (piece.parameter->name.ends_with("weight"))
          CHECK((piece.master.template to_vector<float>() == before) == frozen);
        CHECK(piece.state.empty() == frozen);
      }
    });
  }
}

TEST_CASE("a gradient that arrives after its unit's reduction is an error") {
  for (const int world : {1, 2}) {
    run_ranks(world, [&](int, const auto& context, comm::Communicator& communicator) {
      Chain chain(4, 2);
      const comm::Mesh mesh(communicator);
      ShardedModel sharded(chain, mesh, {}, context);
      sharded.load(fill);
      sharded.begin_micro_batch(true, true);
      // Recorded before its unit, so that its gradient arrives after the unit's backward.
      const Tensor bias = ops::reshape(chain.h[1].bias, {4});
      Tensor x = nn::unit(chain.h[0], Tensor::full(context, {2, 4}, DType::F32, 1.0));
      x = nn::unit(
          {&chain.h[1]}, [&](const Tensor& in) { return ops::linear(in, chain.h[1].weight, bias); },
          x);
      CHECK_THROWS_WITH_AS(
          autograd::backward(x, Tensor::full(context, {2, 4}, DType::F32, 1.0)),
          doctest::Contains("gradients of unit 'h.1' were used after they had been reduced"),
          InvalidArgument);
      micro_step(chain, sharded, context, true, true, 0.5);  // usable again
    });
  }
}

TEST_CASE("a unit whose result is not a part of the loss is named") {
  const auto context = Context::create();
  auto single = comm::make_single_communicator();
  Chain chain(4, 2);
  const comm::Mesh mesh(*single);
  ShardedModel sharded(chain, mesh, {}, context);
  sharded.load(fill);
  const Tensor x = Tensor::full(context, {2, 4}, DType::F32, 1.0);
  CHECK_THROWS_WITH_AS(nn::unit(chain.h[0], x),
                       doctest::Contains("unit 'h.0' ran outside of a micro-batch"),
                       InvalidArgument);
  sharded.begin_micro_batch(true, true);
  const Tensor y = nn::unit(chain.h[0], x);
  const Tensor lost = nn::unit(chain.h[1], y);
  const Tensor seed = Tensor::full(context, {2, 4}, DType::F32, 1.0);
  autograd::backward(y, seed);
  CHECK_THROWS_WITH_AS(sharded.end_micro_batch(),
                       doctest::Contains("unit 'h.1' ran forward, but backward did not reach it"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(nn::unit(chain.h[0], x),
                       doctest::Contains("after its gradients of this micro-batch were reduced"),
                       InvalidArgument);
  micro_step(chain, sharded, context, true, true, 0.5);  // usable again
}

TEST_CASE("micro-batches in the wrong order are refused") {
  const auto context = Context::create();
  auto single = comm::make_single_communicator();
  Chain chain(4, 2);
  const comm::Mesh mesh(*single);
  ShardedModel sharded(chain, mesh, {}, context);
  sharded.load(fill);
  const auto step = [&] {
    sharded.step(optim::AdamW(),
                 {.lr = 0.1, .factor = Tensor::full(context, {1}, DType::F32, 1.0)});
  };
  const char* const no_first = "begin the first one of each step with first = true";
  CHECK_THROWS_HOLDING(InvalidArgument, no_first, sharded.begin_micro_batch(false, true));
  CHECK_THROWS_HOLDING(InvalidArgument, "without begin_micro_batch()", sharded.end_micro_batch());
  micro_step(chain, sharded, context, true, false, 0.5);
  CHECK_THROWS_HOLDING(InvalidArgument, "begin that one with last = true", step());
  micro_step(chain, sharded, context, false, true, 0.5);
  step();
  CHECK_THROWS_HOLDING(InvalidArgument, "has no gradient", step());
  CHECK_THROWS_HOLDING(InvalidArgument, no_first, sharded.begin_micro_batch(false, true));
  micro_step(chain, sharded, context, true, true, 0.5);  // usable again
}

TEST_CASE("gradients end with the update, or else when the next step begins") {
  for (const std::string mode : {"none", "optimizer", "gradients", "full"}) {
    CAPTURE(mode);
    run_ranks(2, [&](int, const auto& context, comm::Communicator& communicator) {
      Chain chain(8, 2);
      const comm::Mesh mesh = test::mesh_of(mode, communicator);
      ShardedModel sharded(chain, mesh, test::spec_of(mode), context);
      sharded.load(fill);
      const auto held = [&] { return context->ledger().usage(MemoryCategory::Gradients).current; };
      CHECK(held() == 0);
      micro_step(chain, sharded, context, true, true, 0.5);
      CHECK(held() > 0);
      const Tensor gradient = sharded.units().back()->gradient();
      sharded.begin_micro_batch(true, true);  // a step without an update
      CHECK(held() == 0);
      CHECK_THROWS_AS(gradient.view(), InternalError);
      sharded.end_micro_batch();
      const Tensor zeros = sharded.units().back()->gradient();
      CHECK(zeros.to_vector<float>() ==
            std::vector<float>(static_cast<std::size_t>(zeros.numel()), 0.0F));
      sharded.step(optim::AdamW(),
                   {.lr = 0.1, .factor = Tensor::full(context, {1}, DType::F32, 1.0)});
      CHECK(held() == 0);
      CHECK_THROWS_AS(zeros.view(), InternalError);
    });
  }
}

TEST_CASE("if a rank leaves during a step, the others name it") {
  std::atomic<int> informed{0};
  run_ranks(3, [&](int rank, const auto& context, comm::Communicator& communicator) {
    Chain chain(8, 4);
    const comm::Mesh mesh(communicator);
    ShardedModel sharded(chain, mesh, {}, context);
    sharded.load(fill);
    micro_step(chain, sharded, context, true, true, 0.1);
    if (rank == 1) {
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

TEST_CASE("a sum over bf16 units can be kept in float32") {
  const auto run = [](Chain& chain, const auto& context, bool converts) {
    Tensor x = Tensor::full(context, {2, 4}, DType::F32, 1.0 / 3);
    for (Layer& layer : chain.h) {
      const Tensor in = converts ? x : ops::cast(x, DType::BF16);
      const Tensor y = nn::unit(layer, in);
      x = x + (converts ? y : ops::cast(y, DType::F32));
    }
    CHECK(x.dtype() == DType::F32);
    autograd::backward(x, Tensor::full(context, {2, 4}, DType::F32, 0.7));
    return x.to_vector<float>();
  };
  for (const nn::Recompute recompute : {nn::Recompute::None, nn::Recompute::Block}) {
    const auto context = Context::create();
    Chain plain(4, 3);
    materialize(plain, context, DType::BF16, fill);
    const std::vector<float> expected = run(plain, context, false);

    auto single = comm::make_single_communicator();
    const comm::Mesh mesh(*single);
    Chain chain(4, 3);
    chain.set_recompute(recompute);
    ShardedModel sharded(chain, mesh, {.compute = DType::BF16, .output = DType::F32}, context);
    sharded.load(fill);
    sharded.begin_micro_batch(true, true);
    CHECK(run(chain, context, true) == expected);
    sharded.end_micro_batch();
    for (const auto& unit : sharded.units()) {
      if (unit->parameters().front()->name == "scale") continue;
      const std::vector<float> gradient = unit->gradient().to_vector<float>();
      const Layer& layer = plain.h[unit->name().back() - '0'];
      const std::vector<float> weight = layer.weight.tensor.grad().to_vector<float>();
      CHECK(std::equal(weight.begin(), weight.end(), gradient.begin()));  // at offset 0
    }
  }
}

TEST_CASE("invalid arguments are refused") {
  const auto context = Context::create();
  auto single = comm::make_single_communicator();
  const comm::Mesh mesh(*single);
  nn::Module empty;
  CHECK_THROWS_WITH_AS(ShardedModel(empty, mesh, {}, context), "the model has no parameters",
                       InvalidArgument);
  Chain chain(4, 1);
  CHECK_THROWS_AS(ShardedModel(chain, mesh, {.compute = DType::F64}, context), InvalidArgument);
  CHECK_THROWS_WITH_AS(ShardedModel(chain, mesh, {.output = DType::I32}, context),
                       "results of units are f32 or bf16, got i32", InvalidArgument);
  const ShardedModel sharded(chain, mesh, {}, context);
  CHECK_THROWS_WITH_AS(ShardedModel(chain, mesh, {}, context), "the model is sharded already",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(comm::shard_spec("half"),
                       "shard.mode must be none, optimizer, gradients, full or hybrid, got 'half'",
                       InvalidArgument);
}
