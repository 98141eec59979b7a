// Whole training steps against PyTorch's float64 reference, with ranks as threads.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>

#include "comm/host_staged.h"
#include "comm/single.h"
#include "comm/threads.h"
#include "core/autograd/autograd.h"
#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "core/base/plugin.h"
#include "core/optim/adamw.h"
#include "models/decoder.h"
#include "tests/support/cli.h"
#include "tests/support/golden.h"
#include "tests/support/loss.h"
#include "tests/support/on_threads.h"
#include "tests/support/paths.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using namespace tessera::test;

namespace {

struct Setting {
  int world = 1;
  std::string mode = "full";
  bool recompute = false;
  std::int64_t micro_batch = 0;  // 0: all rows of the rank at once
  DType compute = DType::F32;
  std::string plugin = {};  // CUDA kernels; empty: CPU
  DType master = DType::F32;
  float dropout = 0;
};

/// The fibers, and the GPU backend in TESSERA_TEST_CUDA_PLUGIN, if set.
std::vector<std::string> plugins() {
  std::vector<std::string> result = {fiber_plugin()};
  const char* gpu = std::getenv("TESSERA_TEST_CUDA_PLUGIN");  // NOLINT(concurrency-mt-unsafe)
  if (gpu != nullptr && *gpu != '\0') result.emplace_back(gpu);
  return result;
}

ContextOptions context_options(const std::string& plugin, int rank) {
  if (plugin.empty()) return {.threads = 1 + rank % 2};
  return {.device = {DeviceType::CUDA, rank % count_devices(plugin)}, .plugin = plugin};
}

/// `of_host`, widened on a GPU, whose summation order and exponentials differ from the CPU's.
double bound(const std::string& plugin, double of_host, DType compute = DType::F32) {
  if (plugin.empty() || plugin == fiber_plugin()) return of_host;
  return std::max(of_host, compute == DType::BF16 ? 2e-2 : 1e-4);
}

/// Number of host synchronizations on fiber devices.
std::uint64_t waits_for_fibers() {
  static const Plugin fibers("fibers", "", nullptr, fiber_plugin());
  return fibers.symbol<std::uint64_t (*)()>("tessera_fiber_waits")();
}

struct Outcome {
  std::vector<double> loss, grad_norm;
  std::map<std::string, std::vector<float>> weights;
  std::vector<std::uint64_t> waits;  // on fiber devices, of all ranks, per step
};

// Collects the shards of several ranks into whole parameters.
void collect(comm::ShardedModel& sharded, Outcome& outcome, std::mutex& mutex) {
  const std::lock_guard lock(mutex);
  for (const auto& piece : sharded.owned_pieces()) {
    auto& values = outcome.weights[piece.parameter->name];
    values.resize(static_cast<std::size_t>(piece.parameter->tensor.numel()));
    if (piece.master.dtype() == DType::BF16) {
      const auto half = piece.master.to_vector<BFloat16>();
      std::transform(half.begin(), half.end(), values.begin() + piece.begin,
                     [](BFloat16 value) { return static_cast<float>(value); });
    } else {
      piece.master.copy_to_host(values.data() + piece.begin);
    }
  }
}

Outcome train_ranks(const Golden& golden, const Setting& setting) {
  Outcome outcome;
  std::mutex mutex;
  auto group = std::make_shared<comm::ThreadGroup>(setting.world);
  const auto rank_main = [&](int rank) {
    const auto context = Context::create(context_options(setting.plugin, rank));
    auto communicator = setting.world == 1 ? comm::make_single_communicator()
                                           : comm::make_threads_communicator(group, rank);
    if (!setting.plugin.empty())
      communicator = comm::make_host_staged_communicator(std::move(communicator), context);
    models::Arch config = golden.config;
    config.dropout = setting.dropout;
    models::Decoder model(config);
    const comm::Mesh mesh = mesh_of(setting.mode, *communicator);
    comm::ShardedModel sharded(model, mesh, spec_of(setting.mode, setting.compute, setting.master),
                               context);
    sharded.load(golden.source());
    std::vector<std::uint16_t> tokens(golden.tokens.begin(), golden.tokens.end());
    const io::Sampler data(io::tokens_in_memory(tokens), golden.seq, io::DataOrder::Sequential, 1);
    train::TrainerOptions options;
    const std::int64_t micro_batch =
        setting.micro_batch > 0 ? setting.micro_batch : golden.batch / setting.world;
    model.set_recompute(setting.recompute ? nn::Recompute::Block : nn::Recompute::None);
    options.clip_norm = golden.clip_norm;
    const optim::AdamW adamw({golden.beta1, golden.beta2, golden.eps, golden.weight_decay});
    train::Loader loader(data, *communicator, context, {golden.batch, micro_batch});
    options.schedule.lr = golden.lr;
    train::Trainer trainer(sharded, adamw, loss_of(model), options);
    for (std::int64_t step = 0; step < golden.steps; ++step) {
      const std::uint64_t waited = waits_for_fibers();
      const auto result = trainer.step(step, step * golden.batch, loader, [] { return 0; });
      if (rank == 0) {
        outcome.waits.push_back(waits_for_fibers() - waited);
        outcome.loss.push_back(result.loss);
        outcome.grad_norm.push_back(result.grad_norm);
      }
    }
    collect(sharded, outcome, mutex);
    // Between steps only parameters, optimizer state and gradients are allocated.
    CHECK(context->ledger().usage(MemoryCategory::Activations).current == 0);
    CHECK(context->ledger().usage(MemoryCategory::Workspace).current == 0);
    if (setting.mode == "full" && setting.world > 1) {
      CHECK(context->ledger().usage(MemoryCategory::Gathered).current == 0);
    }
  };
  on_threads(setting.world, rank_main);
  return outcome;
}

std::vector<Setting> settings(std::int64_t batch) {
  std::vector<Setting> result;
  for (const int world : {1, 2, 3, 4}) {
    if (batch % world != 0) continue;
    for (const std::string mode : {"full", "gradients", "optimizer", "none", "hybrid"}) {
      if ((world == 1 && mode != "full") || (mode == "hybrid" && world != 4)) continue;
      result.push_back({world, mode, false, 0, DType::BF16});
      for (const bool recompute : {false, true}) {
        for (const std::int64_t micro : {std::int64_t{0}, std::int64_t{1}}) {
          if (micro == 1 && batch / world == 1) continue;
          if (recompute != (micro == 1) && (mode == "gradients" || mode == "optimizer")) continue;
          result.push_back({world, mode, recompute, micro, DType::F32});
        }
      }
    }
  }
  return result;
}

// Trains, and compares with the reference: in bf16 without the weights.
void check_training(const Golden& golden, const Setting& setting) {
  CAPTURE(golden.folder);
  CAPTURE(setting.plugin);
  CAPTURE(setting.world);
  CAPTURE(setting.mode);
  CAPTURE(setting.recompute);
  CAPTURE(setting.micro_batch);
  CAPTURE(dtype_name(setting.compute));
  const bool exact = setting.compute == DType::F32;
  const Outcome outcome = train_ranks(golden, setting);
  REQUIRE(outcome.loss.size() == golden.loss.size());
  for (std::size_t i = 0; i < golden.loss.size(); ++i) {
    CAPTURE(i);
    CHECK(relative(outcome.loss[i], golden.loss[i]) <
          bound(setting.plugin, exact ? 1e-6 : 5e-3, setting.compute));
    CHECK(relative(outcome.grad_norm[i], golden.grad_norm[i]) <
          bound(setting.plugin, exact ? 5e-6 : 2e-2, setting.compute));
  }
  if (!exact) return;
  REQUIRE(outcome.weights.size() == golden.after.size());
  for (const auto& expected : golden.after) {
    const std::string& name = expected.first;
    CAPTURE(name);
    CHECK(relative_error(outcome.weights.at(name), expected.second) <
          bound(setting.plugin, golden.tolerance(name)));
  }
}

}  // namespace

TEST_CASE("training matches the float64 reference at every world size, mode and split") {
  for (const char* set : {"gpt2-tiny", "gpt2-odd"}) {
    const auto golden = load_golden(set);
    for (const Setting& setting : settings(golden.batch)) check_training(golden, setting);
  }
}

TEST_CASE("the host synchronizes with a device once per step") {
  const auto golden = load_golden("gpt2-odd");
  Setting setting{1, "full", true, 1, DType::BF16, fiber_plugin(), DType::BF16};
  setting.dropout = 0.1F;
  const Outcome outcome = train_ranks(golden, setting);
  REQUIRE(outcome.waits.size() >= 3);
  for (const std::uint64_t waits : outcome.waits) CHECK(waits == 1);
}

TEST_CASE("the CUDA kernels match the reference over whole runs") {
  for (const std::string& plugin : plugins()) {
    for (const std::string set : {"gpt2-tiny", "gpt2-odd"}) {
      const auto golden = load_golden(set);
      for (const DType compute : {DType::F32, DType::BF16}) {
        for (const int world : {1, static_cast<int>(golden.batch)}) {
          // Skipped on fibers to save time.
          if (plugin == fiber_plugin() && world > 1 && set == "gpt2-tiny") continue;
          const bool small = world == 1 && compute == DType::F32;
          check_training(golden, {world, "full", small, small ? 1 : 0, compute, plugin});
        }
      }
    }
  }
}

TEST_CASE("bf16 master weights match the reference losses, and round alike with any sharding") {
  for (const std::string set : {"gpt2-tiny", "gpt2-odd"}) {
    const auto golden = load_golden(set);
    for (const int world : {1, static_cast<int>(golden.batch)}) {
      CAPTURE(set);
      CAPTURE(world);
      Setting setting{world, "full", false, 0, DType::BF16};
      setting.master = DType::BF16;
      const Outcome full = train_ranks(golden, setting);
      for (std::size_t i = 0; i < golden.loss.size(); ++i)
        CHECK(relative(full.loss[i], golden.loss[i]) < 1e-2);
      setting.mode = "none";
      const Outcome none = train_ranks(golden, setting);
      CHECK(none.loss == full.loss);
      CHECK(none.weights == full.weights);
      setting.mode = "full";
      setting.master = DType::F32;
      CHECK(train_ranks(golden, setting).weights != full.weights);
    }
  }
  // On a device, where the update is fused.
  const auto golden = load_golden("gpt2-odd");
  for (const std::string& plugin : plugins()) {
    Setting setting{1, "full", false, 0, DType::BF16, plugin};
    setting.master = DType::BF16;
    const Outcome outcome = train_ranks(golden, setting);
    for (std::size_t i = 0; i < golden.loss.size(); ++i)
      CHECK(relative(outcome.loss[i], golden.loss[i]) < bound(plugin, 1e-2, DType::BF16));
  }
}

TEST_CASE("logits and all gradients match the reference") {
  for (const std::string set : {"gpt2-tiny", "gpt2-odd"}) {
    CAPTURE(set);
    const auto golden = load_golden(set);
    auto places = plugins();
    places.emplace_back();
    for (const std::string& plugin : places) {
      CAPTURE(plugin);
      const auto context = Context::create(context_options(plugin, 0));
      models::Decoder model(golden.config);
      materialize(model, context, DType::F32, golden.source());
      const Shape shape{golden.batch, golden.seq};
      const auto count = static_cast<std::size_t>(numel(shape));
      const std::span<const std::int32_t> all(golden.tokens);
      const Tensor tokens = Tensor::from<std::int32_t>(context, shape, all.subspan(0, count));
      const Tensor targets = Tensor::from<std::int32_t>(context, shape, all.subspan(1, count));

      {
        const NoGradGuard no_grad(*context);
        const Tensor logits = model.logits(tokens);
        CHECK(relative_error(logits.to_vector<float>(), golden.logits) < bound(plugin, 5e-6));
      }
      for (const char* recompute : {"none", "cheap", "mlp", "block", "every 2"}) {
        CAPTURE(recompute);
        for (Parameter* p : model.parameters()) p->tensor.zero_grad();
        model.set_recompute(nn::parse_recompute(recompute));
        const Tensor loss = model.loss(tokens, targets, 1.0 / static_cast<double>(count));
        autograd::backward(loss);
        CHECK(relative(loss.item(), golden.loss[0]) < bound(plugin, 1e-6));
        for (Parameter* p : model.parameters()) {
          CAPTURE(p->name);
          CHECK(relative_error(p->tensor.grad().to_vector<float>(), golden.gradients.at(p->name)) <
                bound(plugin, 5e-6));
        }
      }
    }
  }
}
