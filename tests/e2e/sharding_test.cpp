// Sharding gives the same training results, with memory that decreases with the number of ranks.

#include <doctest/doctest.h>

#include <array>
#include <csignal>
#include <nlohmann/json.hpp>

#include "comm/shared_memory.h"
#include "comm/single.h"
#include "comm/threads.h"
#include "core/base/memory.h"
#include "core/optim/adamw.h"
#include "models/decoder.h"
#include "tests/e2e/small_run.h"
#include "tests/support/loss.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using namespace tessera::test;

namespace {

struct Held {
  std::int64_t parameters = 0, optimizer_state = 0, gradients = 0, gathered = 0;
};

// Trains a small model for two steps, with ranks as threads.
std::vector<Held> train_on_threads(int world, const std::string& mode, DType compute) {
  const models::Arch config{
      .n_layer = 3, .n_head = 2, .n_embd = 36, .vocab_size = 101, .seq_len = 16};
  std::vector<std::uint16_t> tokens(2000);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::uint16_t>(i * i % 101);
  std::vector<Held> held(static_cast<std::size_t>(world));
  const auto group = std::make_shared<comm::ThreadGroup>(world);
  const auto rank_main = [&](int rank) {
    const auto context = Context::create({.threads = 1});
    const auto communicator = world == 1 ? comm::make_single_communicator()
                                         : comm::make_threads_communicator(group, rank);
    models::Decoder model(config);
    const comm::Mesh mesh = mesh_of(mode, *communicator);
    comm::ShardedModel sharded(model, mesh, spec_of(mode, compute), context);
    sharded.load([](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
      initialize_range(p, 7, begin, end, out);
    });
    const io::Sampler data(io::tokens_in_memory(tokens), 16, io::DataOrder::Sequential, 1);
    train::TrainerOptions options;
    options.schedule.lr = 1e-3;
    const optim::AdamW adamw;
    train::Loader loader(data, *communicator, context, {.global_batch = 2 * world});
    train::Trainer trainer(sharded, adamw, loss_of(model), options);
    const auto none = [] { return 0; };
    trainer.step(0, 0, loader, none);
    // Every rank learns at once what any rank received, in a step and in an evaluation.
    const int last = rank + 1 == world;
    CHECK(trainer.step(1, 2 * world, loader, [&] { return last * SIGINT; }).stop_signal == SIGINT);
    const auto whole = trainer.evaluate(loader, 4, none);
    CHECK(whole.stop_signal == 0);
    CHECK(whole.loss > 1);
    int asked = 0;
    const auto in_third = [&] { return ++asked == 3 ? last * SIGTERM : 0; };
    CHECK(trainer.evaluate(loader, 4, in_third).stop_signal == SIGTERM);
    CHECK(asked == 3);
    const auto current = [&](MemoryCategory category) {
      return context->ledger().usage(category).current;
    };
    held[static_cast<std::size_t>(rank)] = {
        current(MemoryCategory::Parameters), current(MemoryCategory::OptimizerState),
        current(MemoryCategory::Gradients), current(MemoryCategory::Gathered)};
  };
  on_threads(world, rank_main);
  return held;
}

}  // namespace

TEST_CASE_FIXTURE(Fixture, "two fully sharded ranks learn as one rank does") {
  std::array<Metrics, 2> metrics;
  std::array<nlohmann::json, 2> summaries;
  for (const int world : {1, 2}) {
    const std::string run = dir.file("run-" + std::to_string(world));
    summaries[static_cast<std::size_t>(world - 1)] = json_of(small_run(text, run, world, 100));
    metrics[static_cast<std::size_t>(world - 1)] = read_metrics(run);
  }
  const auto& [one, two] = metrics;
  REQUIRE(one.steps.size() == 100);
  REQUIRE(two.steps.size() == 100);
  for (std::size_t i = 0; i < 100; ++i) {
    CAPTURE(i);
    CHECK(relative(two.steps[i].loss, one.steps[i].loss) < (i < 5 ? 1e-6 : 1e-4));
  }
  CHECK(std::stod(one.steps[99].loss) < 0.6 * std::stod(one.steps[0].loss));
  REQUIRE(one.val_loss.size() == 4);
  for (const auto& [step, loss] : one.val_loss) {
    CHECK(relative(two.val_loss.at(step), loss) < 1e-4);
  }
  CHECK(summaries[1]["step"] == 100);
  // Shared communication memory does not depend on the model.
  const auto shared = static_cast<double>(comm::shared_memory_bytes(2, {})) / 2;
  CHECK(summaries[1]["memory_peak_bytes"].get<double>() - shared <
        0.75 * summaries[0]["memory_peak_bytes"].get<double>());
}

TEST_CASE_FIXTURE(Fixture, "the communication backend changes no bit") {
  for (const std::string mode : {"full", "gradients", "optimizer", "none", "hybrid"}) {
    CAPTURE(mode);
    const int world = mode == "hybrid" ? 4 : 3;
    std::array<Metrics, 2> metrics;
    for (const std::string backend : {"tcp", "shm"}) {
      const std::string run = dir.file(mode + "-" + backend);
      const auto result = run_to(
          0, joined(joined(small_run(text, run, world, 40),
                           {world == 4 ? "--shard.group=2" : "--shard.group=0"}),
                    {"--train.global_batch=12", "--train.micro_batch=1", "--shard.mode=" + mode,
                     "--train.precision=bf16", "--comm.backend=" + backend}));
      CHECK(holds(result.err, "(" + backend + ")"));  // in the startup table
      metrics[backend == "shm"] = read_metrics(run);
    }
    CHECK(metrics[0].steps.size() == 40);
    CHECK(metrics[0] == metrics[1]);
  }
}

TEST_CASE_FIXTURE(Fixture, "a run resumes with other units and other recomputation") {
  const auto losses = [&](const std::string& run) {
    std::vector<std::string> values;
    for (const auto& step : read_metrics(dir.file(run)).steps) values.push_back(step.loss);
    return values;
  };
  const auto train = [&](const std::string& run, int steps, const Arguments& more) {
    return run_to(0, joined(small_run(text, dir.file(run), 2, steps), more));
  };
  train("whole", 12, {});
  train("parts", 6, {"--shard.units=1B", "--train.recompute=mlp"});
  const auto resumed =
      train("parts", 12, {"--shard.units=h.*.mlp,wpe", "--train.recompute=every 2"});
  CHECK(holds(resumed.err, "step 6 of 12, from"));
  CHECK(losses("whole").size() == 12);
  CHECK(losses("parts") == losses("whole"));
}

TEST_CASE("between steps each rank holds its share of parameters and optimizer state") {
  for (const DType compute : {DType::F32, DType::BF16}) {
    const Held alone = train_on_threads(1, "full", compute).front();
    CHECK(alone.optimizer_state == 2 * alone.parameters);
    CHECK(alone.gradients == 0);  // freed by the update
    for (const int world : {2, 3, 4}) {
      CAPTURE(world);
      for (const Held& held : train_on_threads(world, "full", compute)) {
        // Padding: less than one alignment per unit.
        CHECK(held.parameters * world >= alone.parameters);
        CHECK(held.parameters * world < alone.parameters + alone.parameters / 20);
        CHECK(held.optimizer_state == 2 * held.parameters);
        CHECK(held.gradients == 0);
        CHECK(held.gathered == 0);
      }
    }
    for (const Held& held : train_on_threads(2, "none", compute)) {
      CHECK(held.parameters >= alone.parameters);
      CHECK(held.optimizer_state >= alone.optimizer_state);
    }
  }
}
