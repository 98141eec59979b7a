#include "train/nonfinite.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>

#include "comm/control/memory_store.h"
#include "comm/single.h"
#include "comm/threads.h"
#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/optim/adamw.h"
#include "models/decoder.h"
#include "tests/support/check_throws.h"
#include "tests/support/loss.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"
#include "tests/support/text.h"

using namespace tessera;
using test::holds;
using train::StepFindings;
using train::StepResult;

namespace {

constexpr std::int64_t kSeqLen = 16, kSpoiledStep = 1;
// The embeddings of this token and this position are finite, their sum overflows.
constexpr std::int32_t kToken = 100;
constexpr std::int64_t kPosition = 8;
constexpr float kLarge = 3e38F;

// Harmless tokens, except for kToken at one place in a limited number of reads.
class Tokens final : public io::TokenSource {
 public:
  Tokens(std::int64_t place, int times) : place_(place), times_(times) {}
  std::int64_t size() const override { return 4000; }
  void read(std::int64_t begin, std::int64_t count, std::int32_t* dst) const override {
    for (std::int64_t i = begin; i < begin + count; ++i)
      *dst++ = i == place_ && times_-- > 0 ? kToken : static_cast<std::int32_t>(i * i % 90);
  }

 private:
  const std::int64_t place_;
  mutable std::atomic<int> times_;
};

struct Setting {
  int world = 1;
  std::string mode = "full";
  DType compute = DType::F32, master = DType::F32;
  int micro_batches = 1;
  bool recompute = false;
  bool skip = false;
  int times = 1000;         // reads that return the token
  int bad_weights_of = -1;  // a rank, in mode None
  std::int64_t steps = 4;
};

struct Outcome {
  std::int64_t gradients_held = 0;  // after steps, in bytes
  std::vector<StepResult> steps;
  std::string error;
  std::vector<std::vector<float>> before, after;  // weights and moments around the bad step
};

std::vector<std::vector<float>> state_of(comm::ShardedModel& sharded) {
  std::vector<std::vector<float>> values;
  sharded.create_optimizer_state(optim::AdamW());
  const auto floats = [](const Tensor& t) {
    std::vector<float> out;
    if (t.dtype() == DType::F32) return t.to_vector<float>();
    for (const auto x : t.to_vector<BFloat16>()) out.push_back(static_cast<float>(x));
    return out;
  };
  for (const auto& piece : sharded.held_pieces())
    for (const Tensor& t : {piece.master, piece.state[0].values, piece.state[1].values})
      values.push_back(floats(t));
  return values;
}

// The last rank's last row of step 1 contains the token.
std::vector<Outcome> train_ranks(const Setting& setting) {
  const models::Arch config{
      .n_layer = 2, .n_head = 2, .n_embd = 36, .vocab_size = 101, .seq_len = kSeqLen};
  const std::int64_t rows = setting.world * setting.micro_batches;
  const auto group = std::make_shared<comm::ThreadGroup>(setting.world);
  comm::MemoryStore store;
  std::vector<Outcome> outcomes(static_cast<std::size_t>(setting.world));
  const auto rank_main = [&](int rank) {
    const auto context = Context::create({.threads = 1});
    const auto communicator =
        setting.world == 1
            ? comm::make_single_communicator()
            : comm::make_threads_communicator(group, rank, {.timeout = std::chrono::seconds(30)});
    models::Decoder model(config);
    const comm::Mesh mesh = test::mesh_of(setting.mode, *communicator);
    comm::ShardedModel sharded(
        model, mesh, test::spec_of(setting.mode, setting.compute, setting.master), context);
    sharded.load([&](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
      initialize_range(p, 7, begin, end, out);
      const auto put = [&](std::int64_t element, float value) {
        if (element >= begin && element < end) out[element - begin] = value;
      };
      if (p.name.find("wte") != std::string::npos) put(kToken * config.n_embd, kLarge);
      if (p.name.find("wpe") != std::string::npos) put(kPosition * config.n_embd, kLarge);
      // Keeps logits finite on ranks without kToken: the tied output head holds kLarge, too.
      if (p.name.find("ln_f.weight") != std::string::npos) std::fill(out, out + (end - begin), 0);
      if (rank == setting.bad_weights_of && p.name.find("h.1.mlp.c_fc.weight") != std::string::npos)
        put(2 * 4 * config.n_embd + 5, -INFINITY);
    });
    const auto tokens =
        std::make_shared<Tokens>((2 * rows - 1) * kSeqLen + kPosition, setting.times);
    const io::Sampler data(tokens, kSeqLen, io::DataOrder::Sequential, 1);
    train::TrainerOptions options;
    model.set_recompute(setting.recompute ? nn::Recompute::Block : nn::Recompute::None);
    options.schedule.lr = 1e-3;
    options.skip_nonfinite = setting.skip;
    options.exchange = [&](const std::string& name, const std::string& text) {
      return comm::exchange(store, name, rank, setting.world, text, std::chrono::seconds(30));
    };
    const optim::AdamW adamw;
    train::Loader loader(data, *communicator, context, {.global_batch = rows});
    train::Trainer trainer(sharded, adamw, test::loss_of(model), options);
    Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    try {
      for (std::int64_t step = 0; step < setting.steps; ++step) {
        if (step == kSpoiledStep) outcome.before = state_of(sharded);
        outcome.steps.push_back(trainer.step(step, step * rows, loader, [] { return 0; }));
        outcome.gradients_held += context->ledger().usage(MemoryCategory::Gradients).current;
        if (step == kSpoiledStep) outcome.after = state_of(sharded);
      }
    } catch (const NonFiniteLoss& error) {
      outcome.error = error.what();
      outcome.after = state_of(sharded);
    } catch (const std::exception& error) {
      outcome.error = std::string("another error: ") + error.what();
      communicator->abort("the test failed");
    }
  };
  test::on_threads(setting.world, rank_main);
  return outcomes;
}

}  // namespace

TEST_CASE("the rank and parameter with a non-finite gradient are named by all ranks") {
  std::vector<Setting> settings;
  for (const int world : {1, 2, 3, 4}) {
    for (const std::string mode : {"full", "none"}) {
      settings.push_back({world, mode});
      settings.push_back({world, mode, DType::BF16, DType::F32, 2});
    }
    settings.push_back({world, "full", DType::BF16, DType::BF16});
    settings.push_back({world, "full", DType::F32, DType::F32, 3, true});
  }
  for (const Setting& setting : settings) {
    const bool sharded = setting.mode == "full";
    CAPTURE(setting.world);
    CAPTURE(sharded);
    CAPTURE(setting.micro_batches);
    CAPTURE(dtype_name(setting.compute));
    const auto outcomes = train_ranks(setting);
    for (const Outcome& outcome : outcomes) {
      INFO(outcome.error);
      CHECK(outcome.steps.size() == 1);
      CHECK(holds(outcome.error,
                  "step 1: the gradient of ln_f.bias is not finite on "
                  "rank " +
                      std::to_string(setting.world - 1) + " (and "));
      CHECK_FALSE(holds(outcome.error, "also on"));
      CHECK(holds(outcome.error, "36 of 36 values, first at [0] is nan"));
      CHECK(holds(outcome.error, "and so is its loss, nan; nothing was updated. Lower optim.lr"));
      CHECK(outcome.error == outcomes[0].error);
      CHECK(outcome.before == outcome.after);
    }
  }
}

TEST_CASE("a skipped step changes nothing; after ten in a row the next one ends training") {
  for (const std::string mode : {"full", "none"}) {
    Setting setting{3, mode};
    setting.skip = true;
    for (const Outcome& outcome : train_ranks(setting)) {
      INFO(outcome.error);
      REQUIRE(outcome.steps.size() == 4);
      CHECK(outcome.before == outcome.after);
      CHECK(outcome.gradients_held == 0);
      for (std::size_t step = 0; step < 4; ++step) {
        CHECK(outcome.steps[step].skipped.empty() == (step != 1));
        CHECK(std::isfinite(outcome.steps[step].grad_norm) == (step != 1));
      }
    }
  }
  Setting setting{2, "none"};
  setting.bad_weights_of = 1;
  setting.skip = true;
  setting.steps = 20;
  for (const Outcome& outcome : train_ranks(setting)) {
    CHECK(outcome.steps.size() == train::kMostSkipped);
    CHECK(holds(outcome.error, "step 10: the weights of h.1.mlp.c_fc.weight are not finite"));
    CHECK(holds(outcome.error, "(10 steps in a row were skipped before)"));
  }
}

TEST_CASE("non-finite weights are named, not the gradients that follow from them") {
  Setting setting{3, "none"};
  setting.bad_weights_of = 2;
  for (const Outcome& outcome : train_ranks(setting)) {
    INFO(outcome.error);
    CHECK(outcome.steps.empty());
    CHECK(holds(outcome.error,
                "step 0: the weights of h.1.mlp.c_fc.weight are not finite on rank 2: 1 of 5184 "
                "values, first at [2, 5] is -inf; they were not finite before the step"));
  }
}

TEST_CASE("a result that is finite when recomputed is reported as a transient fault") {
  for (const int world : {1, 2}) {
    Setting setting{world, "full"};
    setting.times = 1;
    for (const Outcome& outcome : train_ranks(setting)) {
      INFO(outcome.error);
      CHECK(outcome.steps.size() == 1);
      CHECK(holds(outcome.error,
                  "step 1: loss is nan and the gradient norm nan, but both came out "
                  "finite when computed again: a transient fault"));
      CHECK(outcome.before == outcome.after);
    }
  }
}

TEST_CASE("findings are sent to other ranks as text") {
  StepFindings findings;
  findings.loss = "inf";
  findings.sums.add({{"a", 1, 2, "[1]", "nan"}, {"b", 3, 4, "[0, 1]", "-inf"}});
  findings.sums.add({{"a", 2, 2, "[0]", "nan"}});
  const StepFindings read = train::decode_findings(train::encode(findings));
  CHECK(read.loss == "inf");
  CHECK(read.gradients.count == 0);
  CHECK(read.sums.count == 2);
  CHECK(read.sums.first.first == "[1]");
  for (const char* text : {"", "{}", "[1]", R"(["",[-1,"",0,0,"",""],[],[]])"})
    CHECK_THROWS_HOLDING(CommError, "do all ranks run the same build?",
                         train::decode_findings(text));
}

TEST_CASE("the message names the first cause") {
  std::vector<StepFindings> ranks(3);
  train::NonFiniteStep step{7, NAN, INFINITY, false, ranks};
  CHECK(describe(step).starts_with("step 7: loss is nan and the gradient norm inf; nothing was"));
  ranks[1].sums.add({{"h.0.x", 1, 8, "[3]", "inf"}});
  CHECK(
      describe(step).starts_with("step 7: the gradient of h.0.x is finite on each rank, but its "
                                 "sum, which rank 1 holds, is not: 1 of 8 values, first at [3]"));
  ranks[2].loss = "inf";
  CHECK(describe(step).starts_with("step 7: the loss of rank 2 is inf; "));
  ranks[1].gradients.add({{"h.3.w", 17, 4096, "[5, 100]", "nan"}, {"b", 1, 1, "[0]", "nan"}});
  ranks[2].gradients.add({{"h.3.w", 1, 4096, "[0, 0]", "nan"}});
  CHECK(describe(step).starts_with(
      "step 7: the gradient of h.3.w is not finite on rank 1 (and 1 more parameter; also on rank "
      "2): 17 of 4096 values, first at [5, 100] is nan; nothing was updated"));
}
