// Unit policies and recomputation: neither changes a bit of the results.

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "comm/sharding/layout_text.h"
#include "comm/sharding/sharded_model.h"
#include "comm/single.h"
#include "comm/threads.h"
#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/base/rng.h"
#include "core/nn/layers.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/view.h"
#include "core/optim/adamw.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using comm::ShardedModel;

namespace {

constexpr std::int64_t kWidth = 16, kHidden = 64, kTokens = 31;

struct Block : nn::Module {
  nn::LayerNorm norm;
  nn::Mlp mlp;
  nn::Dropout dropout;
  nn::RmsNorm gated_norm;
  nn::GatedMlp gated;
  Block(nn::Module& parent, std::string_view name)
      : Module(parent, name),
        norm(*this, "norm", kWidth),
        mlp(*this, "mlp", {.width = kWidth, .hidden = kHidden}),
        dropout(*this, "dropout", 0.2F),
        gated_norm(*this, "gated_norm", kWidth),
        gated(*this, "gated", {.width = kWidth, .hidden = kHidden, .bias = false}) {}
  Tensor operator()(const Tensor& x) const {
    const Tensor h = ops::add(x, dropout(mlp(norm(x))));
    return ops::add(h, gated(gated_norm(h)));
  }
};

// A small decoder with a tied head.
struct Net : nn::Module {
  nn::Embedding embed{*this, "embed", kTokens, kWidth};
  nn::List<Block> h;
  nn::LayerNorm norm;
  explicit Net(std::int64_t layers) : h(*this, "h", layers), norm(*this, "norm", kWidth) {}
  Tensor loss(const Tensor& tokens, const Tensor& targets, double scale) {
    Tensor x = nn::unit(embed, tokens);
    for (Block& block : h) x = nn::unit(block, x);
    x = ops::reshape(nn::unit(norm, x), {targets.numel(), kWidth});
    const auto head = [this, scale](const Tensor& in, const Tensor& t) {
      return ops::linear_cross_entropy(in, embed.weight, t, scale);
    };
    return nn::unit({&embed}, head, x, targets);
  }
};

struct Setting {
  int world = 1;
  std::string mode = "full", units = "block", recompute = "none";
  DType compute = DType::F32;
  int gather_ahead = 1;
  std::int64_t layers = 3;
  DType master = DType::F32;
};

struct Outcome {
  std::vector<float> losses;
  std::map<std::string, std::vector<float>> weights;
  std::int64_t activations = 0, gathered = 0;  // peaks of rank 0, in bytes
  std::int64_t sent = 0;                       // by rank 0 to gather parameters in the last step

  bool same_bits(const Outcome& other) const {
    return losses == other.losses && weights == other.weights;
  }
};

// Trains for three steps of two micro-batches.
Outcome train(const Setting& setting) {
  Outcome outcome;
  std::mutex mutex;
  const auto group = std::make_shared<comm::ThreadGroup>(setting.world);
  test::on_threads(setting.world, [&](int rank) {
    const auto context = Context::create();
    const auto world = setting.world == 1 ? comm::make_single_communicator()
                                          : comm::make_threads_communicator(group, rank);
    const comm::Mesh mesh = test::mesh_of(setting.mode, *world);
    Net net(setting.layers);
    net.set_training(true);
    net.set_recompute(nn::parse_recompute(setting.recompute));
    comm::ShardSpec spec = test::spec_of(setting.mode, setting.compute, setting.master);
    spec.units = nn::parse_unit_policy(setting.units);
    spec.gather_ahead = setting.gather_ahead;
    ShardedModel sharded(net, mesh, spec, context);
    sharded.load([](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
      initialize_range(p, 5, begin, end, out);
    });
    const std::int64_t rows = 12 / setting.world / 2;
    std::int64_t sent = 0;
    for (std::int64_t step = 0; step < 3; ++step) {
      sent = mesh.shard().traffic().all_gather;
      for (std::int64_t m = 0; m < 2; ++m) {
        const std::int64_t first = rank * 2 * rows + m * rows;
        std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * 4));
        for (std::size_t i = 0; i < ids.size(); ++i)
          ids[i] =
              static_cast<std::int32_t>((static_cast<std::size_t>(first) * 4 + i * 7) % kTokens);
        context->set_rng_step(
            {3, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(first)});
        sharded.begin_micro_batch(m == 0, m == 1);
        const Tensor loss =
            net.loss(Tensor::from<std::int32_t>(context, {rows, 4}, ids),
                     Tensor::from<std::int32_t>(context, {rows * 4}, ids), 1.0 / 48);
        autograd::backward(loss);
        sharded.end_micro_batch();
        if (rank == 0) outcome.losses.push_back(loss.to_vector<float>().front());
      }
      sharded.step(optim::AdamW(), {0.05, step + 1, Tensor::full(context, {1}, DType::F32, 1.0)});
    }
    const std::lock_guard lock(mutex);
    const MemoryLedger& ledger = context->ledger();
    CHECK(ledger.usage(MemoryCategory::Activations).current == 0);
    if (setting.mode == "full" && setting.world > 1)
      CHECK(ledger.usage(MemoryCategory::Gathered).current == 0);
    if (rank == 0) {
      outcome.activations = ledger.usage(MemoryCategory::Activations).peak;
      outcome.gathered = ledger.usage(MemoryCategory::Gathered).peak;
      outcome.sent = mesh.shard().traffic().all_gather - sent;
    }
    for (const ShardedModel::Piece& piece : sharded.owned_pieces()) {
      auto& values = outcome.weights[piece.parameter->name];
      values.resize(static_cast<std::size_t>(piece.parameter->tensor.numel()));
      if (setting.master == DType::F32) {
        piece.master.copy_to_host(values.data() + piece.begin);
      } else {
        const auto half = piece.master.to_vector<BFloat16>();
        std::transform(half.begin(), half.end(), values.begin() + piece.begin,
                       [](BFloat16 x) { return static_cast<float>(x); });
      }
    }
  });
  return outcome;
}

// By size with the embedding and the norm in units of blocks; parts of blocks; all in one.
const std::vector<std::string> kPolicies = {"6K", "h.*.mlp", "h.*.gated.up,h.1,embed", "1B"};

}  // namespace

TEST_CASE("unit policies change no bit, in any mode") {
  for (const int world : {1, 2}) {
    for (const std::string mode : {"full", "gradients", "optimizer", "none"}) {
      if (world == 1 && mode != "full") continue;
      for (const DType compute : {DType::F32, DType::BF16}) {
        const Outcome by_block = train({world, mode, "block", "none", compute});
        for (const std::string& units : kPolicies) {
          CAPTURE(world);
          CAPTURE(mode);
          CAPTURE(units);
          CHECK(train({world, mode, units, "none", compute}).same_bits(by_block));
        }
      }
    }
  }
  const Outcome by_block = train({4, "hybrid"});
  Setting rounded{2, "full", "block", "none", DType::BF16};
  rounded.master = DType::BF16;
  const Outcome rounded_by_block = train(rounded);
  for (const std::string& units : kPolicies) {
    CHECK(train({4, "hybrid", units, "block"}).same_bits(by_block));
    rounded.units = units;
    CHECK(train(rounded).same_bits(rounded_by_block));
  }
}

TEST_CASE("a unit of several blocks is gathered once for all of them, at any prefetch distance") {
  Setting setting{2, "full", "block"};
  const Outcome by_block = train(setting);
  for (const int ahead : {0, 1, 3}) {
    CAPTURE(ahead);
    setting.gather_ahead = ahead;
    setting.units = "1B";
    const Outcome whole = train(setting);
    CHECK(whole.same_bits(by_block));
    // Once per micro-batch; by block all but the last two units are gathered for backward again.
    CHECK(whole.sent < by_block.sent);
    CHECK(whole.gathered > by_block.gathered);
    setting.units = "h.*.mlp,h.*.gated";
    const Outcome parts = train(setting);
    CHECK(parts.same_bits(by_block));
    CHECK(parts.sent <= by_block.sent * 11 / 10);
  }
}

TEST_CASE("recomputation of any part changes no bit, and lowers the peak of activations") {
  for (const int world : {1, 2}) {
    for (const DType compute : {DType::F32, DType::BF16}) {
      CAPTURE(world);
      CAPTURE(dtype_name(compute));
      Setting setting{world, "full", "block", "none", compute, 1, 8};
      const Outcome none = train(setting);
      std::map<std::string, std::int64_t> peak;
      for (const std::string recompute : {"cheap", "mlp", "block", "every 2"}) {
        CAPTURE(recompute);
        setting.recompute = recompute;
        const Outcome again = train(setting);
        CHECK(again.same_bits(none));
        peak[recompute] = again.activations;
      }
      CHECK(peak["cheap"] * 4 < none.activations * 3);
      CHECK(peak["mlp"] * 2 < none.activations);
      CHECK(peak["every 2"] * 3 < none.activations * 2);
      CHECK(peak["block"] * 2 < peak["every 2"]);
    }
  }
}

TEST_CASE("recomputation works with units that are parts of what is recomputed") {
  const Outcome expected = train({2, "full", "block", "none"});
  for (const std::string& units : kPolicies)
    for (const std::string recompute : {"cheap", "mlp", "block", "every 2"})
      CHECK(train({2, "full", units, recompute}).same_bits(expected));
}

TEST_CASE("ranks with other unit policies have other layouts") {
  const auto alone = comm::make_single_communicator();
  const comm::Mesh mesh(*alone);
  const auto layout = [&](const std::string& units) {
    Net net(3);
    comm::ShardSpec spec;
    spec.units = nn::parse_unit_policy(units);
    return comm::layout_text(ShardedModel(net, mesh, spec, Context::create()));
  };
  for (const std::string& units : kPolicies) CHECK(layout(units) != layout("block"));
}
