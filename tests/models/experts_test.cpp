// Models with experts, sharded: how they are split, gathered and recomputed changes no value.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "comm/sharding/sharded_model.h"
#include "comm/single.h"
#include "comm/threads.h"
#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/optim/adamw.h"
#include "models/decoder.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using models::Arch;

namespace {

constexpr std::int64_t kRows = 4, kLength = 6, kTokens = 31;

Arch small_arch() {
  Arch arch = models::arch_of_family("qwen3_moe", {.n_layer = 3,
                                                   .n_head = 2,
                                                   .n_kv_head = 1,
                                                   .n_embd = 16,
                                                   .n_inner = 32,
                                                   .vocab_size = kTokens,
                                                   .seq_len = kLength,
                                                   .n_expert = 5,
                                                   .n_expert_used = 2,
                                                   .n_expert_inner = 24});
  arch.experts.aux_loss = 0.1;
  arch.experts.dense_layers = {1};
  return arch;
}

Tensor tokens_of_row(const std::shared_ptr<Context>& context, std::int64_t row) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < kLength; ++i)
    ids.push_back(static_cast<std::int32_t>((row * kLength + i * i * 7 + 3) % kTokens));
  return Tensor::from<std::int32_t>(context, {1, kLength}, ids);
}

struct Setting {
  int world = 1;
  std::string mode = "full", units = "block", recompute = "none";
  DType compute = DType::F32;
};

struct Outcome {
  double loss = 0;  // of the last step
  std::map<std::string, std::vector<float>> weights;
  std::int64_t gathered = 0;  // peak of rank 0, in bytes

  bool same_bits(const Outcome& other) const {
    return loss == other.loss && weights == other.weights;
  }
};

// Trains for three steps, where each row is a micro-batch, because an auxiliary loss is a mean over
// micro-batches.
Outcome train(const Setting& setting) {
  Outcome outcome;
  std::mutex mutex;
  const auto group = std::make_shared<comm::ThreadGroup>(setting.world);
  test::on_threads(setting.world, [&](int rank) {
    const auto context = Context::create();
    const auto world = setting.world == 1 ? comm::make_single_communicator()
                                          : comm::make_threads_communicator(group, rank);
    const comm::Mesh mesh = test::mesh_of(setting.mode, *world);
    models::Decoder model(small_arch());
    model.set_recompute(nn::parse_recompute(setting.recompute));
    comm::ShardSpec spec = test::spec_of(setting.mode, setting.compute);
    spec.units = nn::parse_unit_policy(setting.units);
    spec.gather_ahead = 0;
    comm::ShardedModel sharded(model, mesh, spec, context);
    sharded.load([](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
      initialize_range(p, 5, begin, end, out);
      if (!p.name.ends_with("norm.weight"))
        for (std::int64_t i = 0; i < end - begin; ++i) out[i] *= 10;
    });
    const std::int64_t rows = kRows / setting.world;
    Tensor totals;
    for (std::int64_t step = 0; step < 3; ++step) {
      totals = Tensor::full(context, {2}, DType::F64, 0.0);
      for (std::int64_t m = 0; m < rows; ++m) {
        sharded.begin_micro_batch(m == 0, m == rows - 1);
        const Tensor tokens = tokens_of_row(context, rank * rows + m);
        const Tensor loss = model.loss(tokens, tokens, 1.0 / (kRows * kLength));
        autograd::backward(loss);
        sharded.end_micro_batch();
        totals.data<double>()[1] += loss.item();
      }
      sharded.sum_totals(totals);
      sharded.step(optim::AdamW(), {0.01, step + 1, Tensor::full(context, {1}, DType::F32, 1.0)});
    }
    const std::lock_guard lock(mutex);
    if (rank == 0) {
      outcome.loss = totals.to_vector<double>()[1];
      outcome.gathered = context->ledger().usage(MemoryCategory::Gathered).peak;
    }
    for (const comm::ShardedModel::Piece& piece : sharded.owned_pieces()) {
      auto& values = outcome.weights[piece.parameter->name];
      values.resize(static_cast<std::size_t>(piece.parameter->tensor.numel()));
      piece.master.copy_to_host(values.data() + piece.begin);
    }
  });
  return outcome;
}

}  // namespace

TEST_CASE("experts: every mode trains on any number of ranks as one rank does") {
  const Outcome alone = train({});
  REQUIRE(alone.weights.contains("layers.2.mlp.experts.4.down.weight"));
  for (const int world : {1, 2, 4}) {
    for (const std::string mode : {"full", "gradients", "optimizer", "none", "hybrid"}) {
      if (mode == "hybrid" && world != 4) continue;
      CAPTURE(world);
      CAPTURE(mode);
      const Outcome outcome = train({world, mode});
      CHECK(outcome.loss == doctest::Approx(alone.loss).epsilon(1e-5));
      double most = 0;
      for (const auto& [name, values] : alone.weights)
        for (std::size_t i = 0; i < values.size(); ++i)
          most = std::max(most, std::abs(static_cast<double>(values[i]) -
                                         static_cast<double>(outcome.weights.at(name)[i])));
      CHECK(most < 2e-4);  // AdamW amplifies rounding errors of small gradients
    }
  }
}

TEST_CASE("experts: unit policies and recomputation change no bit; experts can be gathered alone") {
  for (const DType compute : {DType::F32, DType::BF16}) {
    for (const int world : {1, 2}) {
      const Outcome by_block = train({world, "full", "block", "none", compute});
      for (const std::string units : {"layers.*.mlp.experts.*", "layers.*.mlp",
                                      "layers.0.mlp.router", "layers.2.mlp.experts.1", "6K"}) {
        for (const std::string recompute : {"none", "cheap", "mlp", "block"}) {
          CAPTURE(units);
          CAPTURE(recompute);
          const Outcome outcome = train({world, "full", units, recompute, compute});
          CHECK(outcome.same_bits(by_block));
          if (world > 1 && units == "layers.*.mlp.experts.*" && recompute == "block")
            CHECK(outcome.gathered * 3 < by_block.gathered * 2);
        }
      }
    }
  }
}

TEST_CASE("experts: the auxiliary loss is part of a loss that is trained, not of an evaluation") {
  Arch arch = small_arch();
  const auto context = Context::create();
  const auto losses = [&](double coefficient) {
    arch.experts.aux_loss = coefficient;
    models::Decoder model(arch);
    materialize(model, context, DType::F32,
                [](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                  initialize_range(p, 5, begin, end, out);
                });
    const Tensor tokens = tokens_of_row(context, 0);
    const double trained = model.loss(tokens, tokens, 1.0 / kLength).item();
    const NoGradGuard no_grad(*context);
    return std::pair(trained, model.loss(tokens, tokens, 1.0 / kLength).item());
  };
  const auto with = losses(0.1), without = losses(0);
  CHECK(with.second == without.second);
  CHECK(without.first == without.second);
  // Near k = 2 where tokens use experts evenly, and more where they do not.
  const double balance = (with.first - with.second) / 0.1;
  CHECK(balance > 1.9);
  CHECK(balance < 5);
}

TEST_CASE("experts: refuses numbers that do not fit") {
  const auto refused = [](auto change, const char* message) {
    Arch arch = small_arch();
    change(arch);
    CHECK_THROWS_WITH_AS(arch.validate(), doctest::Contains(message), InvalidArgument);
  };
  refused([](Arch& a) { a.experts.per_token = 6; }, "a token can't be routed to 6 of 5 experts");
  refused([](Arch& a) { a.experts.count = 257; }, "model.n_expert may be 256 at most");
  refused([](Arch& a) { a.mlp = Arch::Mlp::Gelu; }, "experts are gated MLPs without biases");
  refused([](Arch& a) { a.experts.count = 0; }, "but the model has no experts");
  CHECK_THROWS_WITH_AS(models::arch_of_family("mixtral", {.n_layer = 1,
                                                          .n_head = 1,
                                                          .n_embd = 4,
                                                          .vocab_size = 5,
                                                          .seq_len = 4,
                                                          .n_expert_inner = 8}),
                       "a mixtral has no model.n_expert_inner; leave it out", InvalidArgument);
}

TEST_CASE("the auxiliary loss counts by targets, not by tokens that have none") {
  // The same for a micro-batch that is a whole step, however many of its tokens have targets.
  const auto auxiliary = [](std::int64_t targets) {
    const auto context = Context::create();
    const auto loss = [&](double coefficient) {
      Arch arch = small_arch();
      arch.experts.aux_loss = coefficient;
      models::Decoder model(arch);
      materialize(model, context, DType::F64,
                  [](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                    initialize_range(p, 5, begin, end, out);
                  });
      const Tensor tokens = tokens_of_row(context, 0);
      std::vector<std::int32_t> ids = tokens.to_vector<std::int32_t>();
      std::fill(ids.begin() + targets, ids.end(), -1);
      return model
          .loss(tokens, Tensor::from<std::int32_t>(context, {1, kLength}, ids),
                1.0 / static_cast<double>(targets), {.targets = targets})
          .item();
    };
    return loss(0.1) - loss(0);
  };
  CHECK(auxiliary(kLength) > 0.05);
  CHECK(auxiliary(2) == doctest::Approx(auxiliary(kLength)).epsilon(1e-9));
}
