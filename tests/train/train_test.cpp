#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/memory.h"
#include "core/nn/layers.h"
#include "core/nn/unit.h"
#include "core/ops/activation.h"
#include "core/ops/elementwise.h"
#include "core/ops/reduction.h"
#include "core/optim/adamw8bit.h"
#include "core/optim/moving_average.h"
#include "core/optim/muon.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/consolidate.h"
#include "io/safetensors/directory.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"
#include "train/checkpoints.h"
#include "train/load_state.h"
#include "train/loader.h"
#include "train/plan.h"
#include "train/step.h"
#include "train/trainer.h"

using namespace tessera;
using namespace tessera::train;

namespace {

struct Net : nn::Module {
  nn::Linear up{*this, "up", {.in = 4, .out = 16}};
  nn::Linear down{*this, "down", {.in = 16, .out = 1}};
  Tensor operator()(const Tensor& x) { return nn::unit(down, ops::gelu(nn::unit(up, x))); }
};

// Momentum without bias correction: one state tensor.
class Momentum final : public optim::Optimizer {
 public:
  std::vector<std::string> state_names() const override { return {"momentum"}; }
  void update(const optim::Segment& segment, const optim::UpdateOptions& options) const override {
    auto* const w = segment.param.data<float>();
    auto* const m = segment.state[0].data<float>();
    const auto* const g = segment.grad.data<float>();
    const float factor = options.factor.to_vector<float>()[0];
    if (std::isnan(factor)) return;
    for (std::int64_t i = 0; i < segment.param.numel(); ++i) {
      m[i] = 0.9F * m[i] + factor * g[i];
      w[i] -= static_cast<float>(options.lr) * m[i];
    }
  }
};

constexpr std::int64_t kBatch = 12;

// Sample s as a row of four numbers; the target is their sum.
Tensor rows(const std::shared_ptr<Context>& context, std::int64_t first, std::int64_t count) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < 4 * count; ++i)
    values.push_back(std::sin(static_cast<float>(4 * first + i)));
  return Tensor::from<float>(context, {count, 4}, std::span<const float>(values));
}

double train_step(Rank& rank, Net& net, comm::ShardedModel& model,
                  const optim::Optimizer& optimizer, std::int64_t number) {
  const std::int64_t share = kBatch / rank.world_size(), half = share / 2;
  Step step(model, {.step = number, .micro_batches = 2, .seed = 1});
  for (std::int64_t m = 0; m < 2; ++m) {
    const std::int64_t first = number * kBatch + rank.rank() * share + m * half;
    const Tensor x = rows(rank.context, first, half);
    step.micro_batch(first, [&] {
      const Tensor error = net(x) - ops::sum(x, 1, true);
      return ops::sum(error * error) / static_cast<double>(kBatch);
    });
  }
  return step.finish(optimizer, {.lr = 0.05, .clip_norm = 1.0}).loss;
}

std::vector<double> train_on(int world, const std::string& run, std::int64_t until,
                             const optim::Optimizer& optimizer) {
  std::vector<double> losses;
  run_threads(world, [&](Rank& rank) {
    Net net;
    const comm::Mesh mesh(*rank.communicator);
    comm::ShardedModel model(net, mesh, comm::shard_spec("full"), rank.context);
    model.initialize(3);
    Checkpoints checkpoints(run, rank, model, optimizer);
    for (std::int64_t step = checkpoints.load_latest(); step < until; ++step) {
      const double loss = train_step(rank, net, model, optimizer, step);
      if (rank.rank() == 0) losses.push_back(loss);
      if (step % 4 == 3) checkpoints.save(step + 1);
    }
    checkpoints.finish(until);
  });
  return losses;
}

}  // namespace

TEST_CASE("a run with an own optimizer goes on at other numbers of ranks") {
  const optim::AdamW adamw({.weight_decay = 0});
  const Momentum momentum;
  const optim::Muon muon({.adamw = {.weight_decay = 0.1, .decay = kernels::Decay::Shrinking}});
  const optim::AdamW8bit adamw8bit({.weight_decay = 0});
  for (const optim::Optimizer* optimizer : {static_cast<const optim::Optimizer*>(&adamw),
                                            static_cast<const optim::Optimizer*>(&adamw8bit),
                                            static_cast<const optim::Optimizer*>(&momentum),
                                            static_cast<const optim::Optimizer*>(&muon)}) {
    const test::TempDir whole, parts;
    const auto expected = train_on(1, whole.path() / "run", 30, *optimizer);
    CHECK(expected.back() < 0.5 * expected.front());
    std::vector<double> losses;
    for (const auto& [world, until] : {std::pair(2, 10), {3, 18}, {1, 30}}) {
      const auto more = train_on(world, parts.path() / "run", until, *optimizer);
      losses.insert(losses.end(), more.begin(), more.end());
    }
    REQUIRE(losses.size() == expected.size());
    for (std::size_t i = 0; i < losses.size(); ++i)
      CHECK(losses[i] ==
            doctest::Approx(expected[i]).epsilon(optimizer == &adamw8bit ? 1e-3 : 1e-4));
    const auto reader = io::open_checkpoint(parts.path() / "run");
    CHECK(reader.states().size() == optimizer->state_names().size());
  }
}

namespace {

std::vector<float> weights_of(const io::CheckpointReader& reader, const std::string& name) {
  std::vector<float> values(
      static_cast<std::size_t>(numel(reader.tensors(io::kModelSection).at(name).shape)));
  reader.read(io::kModelSection, name, 0, std::ssize(values), values.data(), DType::F32);
  return values;
}

}  // namespace

TEST_CASE("the moving average of weights is the one computed by hand, at any number of ranks") {
  const test::TempDir dir;
  const std::string run = dir.path() / "run";
  const optim::MovingAverage optimizer(std::make_shared<optim::AdamW8bit>(), 0.5);
  const auto checkpoint = [&](std::int64_t step) {
    return io::CheckpointReader::open(std::filesystem::path(run) / "checkpoints" /
                                      io::checkpoint_name(step));
  };
  std::map<std::string, std::vector<float>> expected;
  run_threads(1, [&](Rank& rank) {
    Net net;
    materialize(net, rank.context, DType::F32,
                [](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                  initialize_range(p, 3, begin, end, out);
                });
    for (const Parameter* p : net.parameters()) expected[p->name] = p->tensor.to_vector<float>();
  });
  std::int64_t step = 0;
  for (const auto& [world, until] : {std::pair(2, 3), {3, 6}, {1, 40}}) {
    run_threads(world, [&, until = until](Rank& rank) {
      Net net;
      const comm::Mesh mesh(*rank.communicator);
      comm::ShardedModel model(net, mesh, comm::shard_spec("full"), rank.context);
      Checkpoints checkpoints(run, rank, model, optimizer, {.keep = 0});
      model.initialize(3);
      for (std::int64_t s = checkpoints.load_latest(); s < until; ++s) {
        train_step(rank, net, model, optimizer, s);
        checkpoints.save(s + 1);
      }
      checkpoints.finish(until);
    });
    while (step < until) {
      const auto trained = checkpoint(++step), averaged = trained.with(io::WeightKind::Average);
      const auto t = static_cast<double>(step);
      const auto rest = static_cast<float>(1 - std::min(0.5, (1 + t) / (10 + t)));
      CHECK_FALSE(averaged.has(io::kAverageSection));
      for (auto& [name, average] : expected) {
        const auto now = weights_of(trained, name), got = weights_of(averaged, name);
        for (std::size_t i = 0; i < average.size(); ++i) {
          average[i] += rest * (now[i] - average[i]);
          CHECK(got[i] == doctest::Approx(average[i]).epsilon(1e-5));
        }
        if (step == 1) CHECK(got != now);
      }
    }
  }
  io::ConsolidateOptions average;
  average.format = io::ExportFormat::Safetensors;
  average.weights = io::WeightKind::Average;
  io::consolidate(run, dir.path() / "average", average);
  const auto exported = io::open_safetensors_directory(dir.path() / "average");
  REQUIRE(exported->tensors().size() == 4);
  for (const auto& [name, values] : expected) {
    std::vector<float> got(values.size());
    exported->read(name, 0, std::ssize(got), got.data(), DType::F32);
    for (std::size_t i = 0; i < got.size(); ++i)
      CHECK(got[i] == doctest::Approx(values[i]).epsilon(1e-5));
  }
}

TEST_CASE("an average begins with the weights of a checkpoint without one, and can be left") {
  const test::TempDir dir;
  const auto adamw = std::make_shared<optim::AdamW>();
  const optim::MovingAverage with_average(adamw, 0.999);
  train_on(2, dir.path(), 4, *adamw);
  const auto before = io::open_checkpoint(dir.path());
  CHECK_THROWS_HOLDING(InvalidArgument, "holds no moving average of the weights",
                       before.with(io::WeightKind::Average));
  run_threads(3, [&](Rank& rank) {
    Net net;
    const comm::Mesh mesh(*rank.communicator);
    comm::ShardedModel model(net, mesh, comm::shard_spec("full"), rank.context);
    const auto plan = plan_resume(before, tensors_of(net), state_tensors(net, with_average),
                                  io::LoadPolicy::Exact);
    REQUIRE(plan.notes.size() == 1);
    CHECK(plan.notes[0].ends_with("holds no ema, which starts as the weights as they are now"));
    load_training_state(model, with_average, before, plan, 1, 0);
    for (const auto& piece : model.held_pieces())
      CHECK(piece.state[2].values.to_vector<float>() == piece.master.to_vector<float>());
  });
  train_on(3, dir.path(), 8, with_average);
  CHECK(io::open_checkpoint(dir.path()).states().size() == 3);
  Net net;
  const auto plan = plan_resume(io::open_checkpoint(dir.path()), tensors_of(net),
                                state_tensors(net, *adamw), io::LoadPolicy::Exact);
  REQUIRE(plan.notes.size() == 1);
  CHECK(plan.notes[0].ends_with("is dropped: the optimizer has no such state"));
  train_on(2, dir.path(), 12, *adamw);
  CHECK(io::open_checkpoint(dir.path()).states().size() == 2);
}

TEST_CASE("a step that is not finite leaves the moving average") {
  run_threads(1, [](Rank& rank) {
    Net net;
    const comm::Mesh mesh(*rank.communicator);
    comm::ShardedModel model(net, mesh, {}, rank.context);
    const optim::MovingAverage optimizer(std::make_shared<optim::AdamW>(), 0.5);
    model.initialize(3);
    train_step(rank, net, model, optimizer, 0);
    const auto average = [&] { return model.held_pieces()[0].state[2].values.to_vector<float>(); };
    const auto before = average();
    Step step(model, {.step = 1});
    step.micro_batch(0, [&] { return ops::sum(net(rows(rank.context, 0, 4))) * std::nan(""); });
    step.finish(optimizer, {.lr = 0.1});
    CHECK(average() == before);
    CHECK(before != model.held_pieces()[0].master.to_vector<float>());
  });
}

TEST_CASE("state of another optimizer is refused") {
  const test::TempDir dir;
  train_on(2, dir.path(), 4, Momentum());
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "has no optimizer state exp_avg: it was saved with another "
                       "optimizer, which has momentum",
                       train_on(2, dir.path(), 8, optim::AdamW()));
}

TEST_CASE("a damaged checkpoint is passed over by all ranks; without an intact one none starts") {
  const test::TempDir dir;
  const optim::AdamW adamw;
  train_on(2, dir.path(), 8, adamw);
  const auto damage = [&](std::int64_t step) {
    const auto file =
        dir.path() / "checkpoints" / io::checkpoint_name(step) / "rank-00001-of-00002.safetensors";
    std::string data = io::read_file(file, 1 << 20);
    data.back() = static_cast<char>(data.back() ^ 1);
    io::write_file_atomically(file, data);
  };
  damage(8);
  CHECK(train_on(3, dir.path(), 6, adamw).size() == 2);  // from step 4
  damage(4);
  std::filesystem::remove_all(dir.path() / "checkpoints" / io::checkpoint_name(6));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "none of the checkpoints of",
                       train_on(2, dir.path(), 8, adamw));
}

namespace {

// Trains with the first layer frozen, or all weights but the biases; two savers, of which one saves
// weights only.
std::vector<double> train_frozen(int world, const std::string& run, std::int64_t until,
                                 const optim::Optimizer& optimizer, bool only_biases) {
  std::vector<double> losses;
  run_threads(world, [&](Rank& rank) {
    Net net;
    for (Parameter* p : net.up.parameters()) p->tensor.set_requires_grad(false);
    if (only_biases) net.down.weight.tensor.set_requires_grad(false);
    const comm::Mesh mesh(*rank.communicator);
    comm::ShardedModel model(net, mesh, comm::shard_spec("full"), rank.context);
    model.initialize(3);
    Checkpoints whole(run, rank, model, optimizer, {.model = R"({"width": 16})"});
    Checkpoints weights(run + "/weights", rank, model, optimizer, {.with_optimizer = false});
    for (std::int64_t step = whole.load_latest(); step < until; ++step) {
      const double loss = train_step(rank, net, model, optimizer, step);
      if (rank.rank() == 0) losses.push_back(loss);
      whole.save(step + 1);
      weights.save(step + 1);
    }
    whole.finish(until);
    weights.finish(until);
    CHECK(weights.load_latest() == until);
  });
  return losses;
}

}  // namespace

TEST_CASE("a run with frozen weights resumes; weights alone are saved beside it") {
  const test::TempDir dir;
  const optim::AdamW adamw;
  const auto expected = train_frozen(2, dir.path() / "whole", 6, adamw, false);
  auto losses = train_frozen(2, dir.path() / "parts", 3, adamw, false);
  const auto more = train_frozen(2, dir.path() / "parts", 6, adamw, false);
  losses.insert(losses.end(), more.begin(), more.end());
  CHECK(losses == expected);
  const auto reader = io::open_checkpoint(dir.path() / "parts");
  CHECK(reader.tensors({"exp_avg"}).size() == 2);
  CHECK(reader.tensors(io::kModelSection).size() == 4);
  CHECK_FALSE(io::open_checkpoint(dir.path() / "parts" / "weights").index().optimizer);
}

TEST_CASE("a run resumes if no trained weight has one of the optimizer's states") {
  const test::TempDir dir;
  const optim::Muon muon;
  const auto expected = train_frozen(2, dir.path() / "whole", 6, muon, true);
  auto losses = train_frozen(2, dir.path() / "parts", 3, muon, true);
  const auto more = train_frozen(2, dir.path() / "parts", 6, muon, true);
  losses.insert(losses.end(), more.begin(), more.end());
  CHECK(losses == expected);
  CHECK(io::open_checkpoint(dir.path() / "parts").states().size() == 2);
}

TEST_CASE("a run directory has one owner, and one model") {
  const test::TempDir dir;
  run_threads(1, [&](Rank& rank) {
    Net net;
    const comm::Mesh mesh(*rank.communicator);
    comm::ShardedModel model(net, mesh, {}, rank.context);
    const optim::AdamW adamw;
    {
      Checkpoints checkpoints(dir.path(), rank, model, adamw, {.model = R"({"heads": 2})"});
      CHECK_THROWS_HOLDING(InvalidArgument, "is in use by another run",
                           Checkpoints(dir.path(), rank, model, adamw));
      checkpoints.finish(1);
    }
    Checkpoints other(dir.path(), rank, model, adamw, {.model = R"({"heads": 4})"});
    CHECK_THROWS_HOLDING(InvalidArgument,
                         "is of the model {\"heads\":2}, but this one is {\"heads\":4}",
                         other.load_latest());
  });
}

TEST_CASE("a total that is not finite does not stop updates, and a step ends once") {
  run_threads(1, [](Rank& rank) {
    Net net;
    const comm::Mesh mesh(*rank.communicator);
    comm::ShardedModel model(net, mesh, {}, rank.context);
    model.initialize(3);
    const auto before = net.up.weight.tensor.to_vector<float>();
    Step step(model, {.extra_totals = 1});
    step.micro_batch(0, [&] { return ops::sum(net(rows(rank.context, 0, 2))); });
    step.set_extra(0, std::nan(""));
    CHECK(std::isnan(step.finish(optim::AdamW(), {.lr = 0.1}).extra[0]));
    CHECK(net.up.weight.tensor.to_vector<float>() != before);
    CHECK_THROWS_HOLDING(InvalidArgument, "step 0 is finished", step.sum());
  });
}

TEST_CASE("an error of one thread ends all, and is thrown") {
  for (int culprit = 0; culprit < 3; ++culprit) {
    CHECK_THROWS_HOLDING(IoError, "the disk of rank",
                         run_threads(3,
                                     [&](Rank& rank) {
                                       if (rank.rank() == culprit)
                                         throw IoError("the disk of rank {} is full", culprit);
                                       rank.exchange("never answered");
                                     },
                                     {.timeout = std::chrono::seconds(20)}));
  }
}

TEST_CASE("a plan of an own program is what the program needs, to the byte") {
  const optim::AdamW adamw;
  for (const int world : {1, 2, 3}) {
    const test::TempDir dir;
    const auto program = [&](Rank& rank) {
      Net net;
      const comm::Mesh mesh(*rank.communicator);
      comm::ShardedModel model(net, mesh, comm::shard_spec("full"), rank.context);
      model.initialize(3);
      Checkpoints checkpoints(dir.path(), rank, model, adamw);
      rank.exchange("ready");
      for (std::int64_t step = checkpoints.load_latest(); step < 3; ++step) {
        train_step(rank, net, model, adamw, step);
        checkpoints.save(step + 1);
      }
      checkpoints.finish(3);
    };
    std::vector<std::int64_t> peaks(static_cast<std::size_t>(world));
    run_threads(world,
                [&](Rank& rank) {
                  program(rank);
                  peaks[static_cast<std::size_t>(rank.rank())] =
                      rank.context->ledger().total().peak;
                },
                {.threads = 1});
    for (int number = 0; number < world; ++number) {
      const MemoryPlan planned = plan({.context = {.threads = 1},
                                       .backend = world == 1 ? "single" : "threads",
                                       .rank = number,
                                       .world_size = world},
                                      program);
      CHECK(planned.peak == peaks[static_cast<std::size_t>(number)]);
      CHECK(describe(planned).find("optimizer state") != std::string::npos);
    }
  }
}

TEST_CASE("a step counts its micro-batches") {
  run_threads(1, [](Rank& rank) {
    Net net;
    const comm::Mesh mesh(*rank.communicator);
    comm::ShardedModel model(net, mesh, {}, rank.context);
    model.initialize(3);
    const auto loss = [&] { return ops::sum(net(rows(rank.context, 0, 2))); };
    Step step(model, {.micro_batches = 2});
    step.micro_batch(0, loss);
    CHECK_THROWS_HOLDING(InvalidArgument, "ends after 1 of 2 micro-batches",
                         step.finish(optim::AdamW(), {}));
    step.micro_batch(2, loss);
    CHECK_THROWS_HOLDING(InvalidArgument, "has 2 micro-batches already", step.micro_batch(4, loss));
  });
}

namespace {

// Sample s is s, s + 1, ...; notes the thread of each read.
class Counting final : public io::Samples {
 public:
  std::int64_t seq_len() const override { return 3; }
  std::int64_t samples_per_epoch() const override { return 100; }
  void fill_batch(std::int64_t first, std::int64_t count, std::int32_t* inputs,
                  std::int32_t* targets) const override {
    if (first >= fails_at) throw IoError("sample {} is gone", first);
    {
      const std::lock_guard lock(mutex);
      reader[first] = std::this_thread::get_id();
    }
    for (std::int64_t i = 0; i < 3 * count; ++i) {
      inputs[i] = static_cast<std::int32_t>(first + i / 3 + i % 3);
      targets[i] = inputs[i] + 1;
    }
  }
  std::int64_t fails_at = 1000;
  mutable std::mutex mutex;
  mutable std::map<std::int64_t, std::thread::id> reader;  // by first sample
};

}  // namespace

TEST_CASE("the loader reads the next micro-batch ahead, into the next step") {
  run_threads(2, [](Rank& rank) {
    Counting samples;
    Loader loader(samples, *rank.communicator, rank.context, {.global_batch = 8, .micro_batch = 2});
    REQUIRE(loader.micro_batches() == 2);
    for (std::int64_t step = 0; step < 3; ++step) {
      for (std::int64_t m = 0; m < 2; ++m) {
        const Batch batch = loader.micro_batch(8 * step, m);
        const std::int64_t first = 8 * step + 4 * rank.rank() + 2 * m;
        CHECK(batch.first == first);
        const auto tokens = batch.tokens.to_vector<std::int32_t>();
        CHECK(tokens[0] == first);
        CHECK(tokens[5] == first + 3);
        CHECK(batch.targets.to_vector<std::int32_t>()[5] == first + 4);
      }
    }
    // A jump, such as after an evaluation, is read at once.
    CHECK(loader.micro_batch(80, 0).tokens.to_vector<std::int32_t>()[0] == 80 + 4 * rank.rank());
    const std::lock_guard lock(samples.mutex);
    for (const auto& [first, thread] : samples.reader) {
      const bool is_first = first == 4 * rank.rank() || first == 80 + 4 * rank.rank();
      CHECK((thread == std::this_thread::get_id()) == is_first);
    }
  });
}

TEST_CASE("an error of reading ahead is thrown where its batch is due") {
  run_threads(1, [](Rank& rank) {
    Counting samples;
    samples.fails_at = 2;
    Loader loader(samples, *rank.communicator, rank.context, {.global_batch = 1});
    CHECK(loader.micro_batch(0, 0).first == 0);
    CHECK(loader.micro_batch(1, 0).first == 1);
    CHECK_THROWS_HOLDING(IoError, "sample 2 is gone", loader.micro_batch(2, 0));
    CHECK(loader.micro_batch(1, 0).first == 1);
  });
}

TEST_CASE("an evaluation gives every sample one target, and pads the last pass") {
  run_threads(2, [](Rank& rank) {
    Counting samples;
    Loader loader(samples, *rank.communicator, rank.context, {.global_batch = 4, .micro_batch = 2});
    CHECK(loader.passes(6) == 2);
    const Batch last = loader.pass(1, 6);
    CHECK(last.first == 4 + 2 * rank.rank());
    CHECK((last.targets.to_vector<std::int32_t>()[0] < 0) == (rank.rank() == 1));
  });
}

namespace {

// Row s has s % 4 targets, and rows from 12 on have none.
class Uneven final : public io::Samples {
 public:
  std::int64_t seq_len() const override { return 3; }
  std::int64_t samples_per_epoch() const override { return 16; }
  void fill_batch(std::int64_t first, std::int64_t count, std::int32_t* inputs,
                  std::int32_t* targets) const override {
    for (std::int64_t i = 0; i < 3 * count; ++i) {
      inputs[i] = 0;
      targets[i] = i % 3 < targets_of(first + i / 3) ? 1 : io::kNoTarget;
    }
  }
  std::int64_t count_targets(std::int64_t first, std::int64_t count) const override {
    std::int64_t sum = 0;
    for (std::int64_t s = first; s < first + count; ++s) sum += targets_of(s);
    return sum;
  }

 private:
  static std::int64_t targets_of(std::int64_t sample) { return sample < 12 ? sample % 4 : 0; }
};

}  // namespace

TEST_CASE("the loss is divided by the targets of the whole step, if it has any") {
  run_threads(2, [](Rank& rank) {
    Net net;
    const comm::Mesh mesh(*rank.communicator);
    comm::ShardedModel model(net, mesh, comm::shard_spec("full"), rank.context);
    model.initialize(3);
    const optim::AdamW adamw;
    model.create_optimizer_state(adamw);
    const Uneven samples;
    Loader loader(samples, *rank.communicator, rank.context, {.global_batch = 4, .micro_batch = 1});
    // 1 for each target.
    Trainer trainer(
        model, adamw,
        [&](const Batch& batch, double scale) {
          const auto targets = batch.targets.to_vector<std::int32_t>();
          const auto count = static_cast<double>(std::ranges::count(targets, 1));
          const Tensor nothing = ops::sum(net(rows(rank.context, batch.first, 1)) * 0.0);
          return nothing + Tensor::full(rank.context, nothing.shape(), DType::F32, count * scale);
        },
        {});
    CHECK(trainer.step(0, 0, loader).loss == doctest::Approx(1));
    CHECK(trainer.step(1, 4, loader).loss == doctest::Approx(1));
    CHECK(trainer.step(2, 12, loader).loss == 0);
    CHECK(trainer.evaluate(loader, 0).loss == doctest::Approx(1));
  });
}
