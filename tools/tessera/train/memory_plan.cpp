#include "tools/tessera/train/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "comm/sharding/replica_check.h"
#include "comm/sharding/sharded_model.h"
#include "core/base/memory.h"
#include "core/base/system_memory.h"
#include "core/base/trace.h"
#include "io/checkpoint/async_saver.h"
#include "io/data/sampler.h"
#include "models/language_model.h"
#include "tools/tessera/model/text_generation.h"
#include "tools/tessera/train/checkpoints.h"
#include "tools/tessera/train/setup.h"
#include "train/save_state.h"
#include "train/trainer.h"

namespace tessera::tools {
namespace {

// Rows that are never read.
class PlannedRows final : public io::Samples {
 public:
  PlannedRows(std::int64_t seq_len, bool packed) : seq_len_(seq_len), packed_(packed) {}
  std::int64_t seq_len() const override { return seq_len_; }
  std::int64_t samples_per_epoch() const override { return std::int64_t{1} << 40; }
  bool is_packed() const override { return packed_; }
  void fill_batch(std::int64_t /*first*/, std::int64_t /*rows*/, std::int32_t* /*inputs*/,
                  std::int32_t* /*targets*/) const override {}

 private:
  std::int64_t seq_len_;
  bool packed_;
};

comm::Traffic operator*(const comm::Traffic& t, std::int64_t n) {
  return {t.all_gather * n, t.reduce_scatter * n, t.all_reduce * n};
}
comm::Traffic operator+(const comm::Traffic& a, const comm::Traffic& b) {
  return {a.all_gather + b.all_gather, a.reduce_scatter + b.reduce_scatter,
          a.all_reduce + b.all_reduce};
}
comm::Traffic operator-(const comm::Traffic& a, const comm::Traffic& b) { return a + b * -1; }

// Sums of the kernels that the trace has recorded so far.
StepTime recorded(const Trace& trace) {
  StepTime time{.seconds = trace.planned_now(), .waits = trace.planned_waits(), .kernels = {}};
  for (const KernelTime& kernel : trace.planned_kernels()) {
    StepTime::Kernel& sum = time.kernels[kernel.kernel];
    sum.calls += 1;
    sum.seconds += kernel.seconds;
    sum.work.read += kernel.work.read;
    sum.work.written += kernel.work.written;
    sum.work.flops += kernel.work.flops;
  }
  return time;
}

// The events of a trace that end after `seconds`, which becomes its time 0.
std::string part_of_trace(const std::string& trace, double seconds) {
  auto parsed = nlohmann::ordered_json::parse(trace);
  auto kept = nlohmann::ordered_json::array();
  for (auto& event : parsed.at("traceEvents")) {
    if (event.contains("ts")) {
      const double begin = event.at("ts").get<double>() - seconds * 1e6;
      if (begin + event.at("dur").get<double>() < 1e-3) continue;
      event["ts"] = begin;
    }
    kept.push_back(std::move(event));
  }
  parsed["traceEvents"] = std::move(kept);
  return parsed.dump() + '\n';
}

// a + b * n
StepTime plus(StepTime a, const StepTime& b, double n) {
  a.seconds += b.seconds * n;
  a.waits += b.waits * n;
  for (const auto& [name, kernel] : b.kernels) {
    StepTime::Kernel& sum = a.kernels[name];
    sum.calls += kernel.calls * n;
    sum.seconds += kernel.seconds * n;
    sum.work.read += kernel.work.read * n;
    sum.work.written += kernel.work.written * n;
    sum.work.flops += kernel.work.flops * n;
  }
  return a;
}

// More micro-batches than these change nothing but the traffic.
constexpr std::int64_t kMicroBatches = 3;
// The first step learns the order in which units are needed.
constexpr std::int64_t kSteps = 2;

}  // namespace

RankPlan plan_rank(const Config& config, const models::Arch& model_config, int rank, int world_size,
                   const PlanOptions& options) {
  RankPlan result;
  double flops = 0;
  const auto program = [&](train::Rank& self) {
    const std::shared_ptr<Context>& context = self.context;
    comm::Communicator* const world = self.communicator.get();
    const int group = shard_group_size(config, world_size, options.local_world_size);
    const comm::Mesh mesh(*world, group);
    const auto traffic = [&] {
      comm::Traffic sum = world->traffic();
      for (const comm::Communicator* part : {&mesh.shard(), &mesh.replicate()})
        if (part != world) sum = sum + part->traffic();
      return sum;
    };

    const auto model = make_model(config, model_config);
    model->set_recompute(nn::parse_recompute(config.train.recompute));
    context->set_deterministic(config.train.deterministic == "on");
    comm::ShardedModel sharded(*model, mesh, shard_spec_of(config), context);
    const auto optimizer = make_optimizer(config);
    const std::int64_t per_pass = config.train.micro_batch * world_size;
    const std::int64_t micro_batches = config.train.global_batch / per_pass;
    const PlannedRows data(config.model.seq_len, options.packed);
    sharded.load({});
    sharded.create_optimizer_state(*optimizer);
    std::shared_ptr<Storage> staging;
    const auto stage = [&](std::size_t bytes) {
      return Storage::allocate_on_host(sharded.state_context(), bytes, MemoryCategory::Staging,
                                       "checkpoint");
    };
    const auto saved = [&] {
      return train::make_save_request(sharded, config.checkpoint.what == "all",
                                      model_config.lora.has_value());
    };
    const bool beside = saves_beside_training(config, options.first_step);
    if (beside) staging = stage(io::AsyncSaver::staging_bytes(saved()));

    const auto no_signal = [] { return 0; };
    train::TrainerOptions options_of_steps = trainer_options(config);
    options_of_steps.steps = std::numeric_limits<std::int64_t>::max();
    train::Trainer trainer(sharded, *optimizer, loss_of(*model), std::move(options_of_steps));
    const auto loader_of = [&](std::int64_t count) {
      return std::make_unique<train::Loader>(
          data, *world, context,
          train::LoaderOptions{per_pass * std::min(count, micro_batches),
                               config.train.micro_batch});
    };
    auto loader = loader_of(kMicroBatches);
    const auto val_loader = options.evaluates ? loader_of(1) : nullptr;
    for (std::int64_t step = 0; step < kSteps; ++step) trainer.step(step, 0, *loader, no_signal);
    const auto reaches = [&](std::int64_t every) {
      return every > 0 && config.train.steps / every > options.first_step / every;
    };
    const std::int64_t compares = config.shard.check_replicas_every;
    if (reaches(compares) || (compares > 0 && config.checkpoint.every > 0))
      comm::check_replicas(sharded);
    // Whether something is due before the last step, after which no gathers are under way.
    const auto is_midway = [&](std::int64_t every) {
      return every > 0 && (config.train.steps - 1) / every > options.first_step / every;
    };
    const std::int64_t save_every = config.checkpoint.every, eval_every = config.train.eval_every;
    if (!is_midway(eval_every) && (config.checkpoint.keep_best == 0 || !is_midway(save_every)))
      sharded.release();
    for (int i = 0; options.evaluates && i < 2; ++i) trainer.evaluate(*val_loader, 1, no_signal);
    if (options.prompt_tokens > 0 && options.evaluates) {
      sharded.gather_all();
      const std::vector<std::int32_t> prompt(static_cast<std::size_t>(options.prompt_tokens));
      if (rank == 0) generate(*model, context, {prompt}, {.count = config.train.sample_tokens});
      sharded.end_evaluation();
    }
    // The evaluation and the sample leave weights gathered, which a step does not find otherwise.
    // The timed step waits for what that one began to gather.
    std::optional<Trace> trace;
    if (options.rates != nullptr) trace.emplace(*context, *options.rates);
    trainer.step(kSteps, 0, *loader, no_signal);
    const StepTime earlier = trace ? recorded(*trace) : StepTime{};
    const comm::Traffic before = traffic();
    const double flops_before = context->planned_flops();
    trainer.step(kSteps + 1, 0, *loader, no_signal);
    if (trace) {
      result.time = plus(recorded(*trace), earlier, -1);
      result.timeline = part_of_trace(trace->to_json(rank, fmt::format("rank {}, planned", rank)),
                                      earlier.seconds);
    }

    if (!beside && save_every > 0 && sharded.state_context()->target().type == DeviceType::CUDA) {
      // No gathers are under way in a save that follows an evaluation, or the last step.
      const bool evaluates_before =
          options.evaluates && eval_every > 0 && save_every % eval_every == 0;
      if (!is_midway(save_every) || evaluates_before) sharded.release();
      stage(train::save_copy_bytes(saved()));
    }

    if (sharded.state_context() != context)
      result.offloaded = sharded.state_context()->ledger().total().peak;
    result.traffic = traffic() - before;
    flops = (context->planned_flops() - flops_before) * static_cast<double>(micro_batches) /
            static_cast<double>(std::min(kMicroBatches, micro_batches));
    if (micro_batches > kMicroBatches) {
      // Each further micro-batch sends as much as the last one here.
      const comm::Traffic three = traffic();
      loader.reset();  // so that there is one at a time, as in a run
      loader = loader_of(kMicroBatches - 1);
      trainer.step(kSteps + 2, 0, *loader, no_signal);
      result.traffic =
          result.traffic + (result.traffic - (traffic() - three)) * (micro_batches - kMicroBatches);
      if (trace) {
        const StepTime last = plus(plus(recorded(*trace), earlier, -1), result.time, -1);
        const StepTime one = plus(result.time, last, -1);
        result.time = plus(result.time, one, static_cast<double>(micro_batches - kMicroBatches));
      }
    }
  };
  static_cast<train::MemoryPlan&>(result) = train::plan({.context = options.context,
                                                         .backend = options.backend,
                                                         .rank = rank,
                                                         .world_size = world_size,
                                                         .links = options.links},
                                                        program);
  result.flops = flops;
  result.tokens = config.train.global_batch * config.model.seq_len;
  return result;
}

std::string check_memory(const MemoryNeed& need, const std::function<MemoryAdvice()>& advice,
                         bool refuse) {
  const SystemMemory& memory = need.memory;
  const std::int64_t bytes = (need.plan.peak + need.plan.library_bytes()) * need.ranks;
  if (memory.total <= 0 || bytes <= memory.available) return {};
  std::string text = fmt::format(
      "{} up to {} of memory, and {} {}{}; a rank's share: {}",
      need.ranks == 1 ? "this run needs" : fmt::format("the {} ranks here need", need.ranks),
      format_bytes(bytes), need.there, format_bytes(memory.total),
      memory.available < memory.total
          ? fmt::format(" ({} of it free now)", format_bytes(memory.available))
          : std::string(),
      train::describe(need.plan.at_peak));
  if (refuse && bytes > memory.total)
    throw OutOfMemory("{}", advice().after(text + ". Nothing was started; to start anyway, use "
                                                  "--train.memory_check warn"));
  return text;
}

}  // namespace tessera::tools
