#include "tools/tessera/train/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "comm/sharding/flat_unit.h"
#include "core/autograd/autograd.h"
#include "models/gpt2.h"
#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {
namespace {

std::int64_t& of(MemoryPlan& plan, MemoryCategory category) {
  return plan[static_cast<std::size_t>(category)];
}

// Peak activations of one micro-batch, measured on the meta device.
std::int64_t plan_activations(const RunSetup& setup, DType compute_dtype) {
  const auto meta = Context::create({.device = {DeviceType::Meta, 0}});
  models::Gpt2 model(setup.model);
  materialize(model, meta, compute_dtype, {});
  model.set_training(true);
  model.set_recompute(nn::parse_recompute(setup.config.train.recompute));
  const Shape shape{setup.config.train.micro_batch, setup.config.model.seq_len};
  const Tensor tokens = Tensor::empty(meta, shape, DType::I32, MemoryCategory::Data, "batch");
  autograd::backward(model.loss(tokens, tokens, 1.0));
  return meta->ledger().usage(MemoryCategory::Activations).peak;
}

}  // namespace

MemoryPlan plan_memory(const RunSetup& setup, int world_size, const Context& context) {
  MemoryPlan plan{};
  const bool scatters = setup.config.shard.mode == "full" && world_size > 1;
  const bool bf16 = setup.config.train.precision != "fp32";
  const std::int64_t compute_size = bf16 ? 2 : 4;
  const std::int64_t master_size = setup.config.train.precision == "bf16-true" ? 2 : 4;
  models::Gpt2 model(setup.model);
  std::vector<ShardLayout> units;
  for (const Unit& unit : units_of(model)) units.push_back(layout_of(unit, world_size));
  const auto held_of = [&](const ShardLayout& unit) {
    return scatters ? unit.segment_size() : unit.padded_size();
  };
  std::int64_t held = 0;
  std::int64_t padded = 0;
  std::vector<std::int64_t> blocks;  // padded elements of the units except the root
  for (const ShardLayout& unit : units) {
    held += held_of(unit);
    padded += unit.padded_size();
    blocks.push_back(unit.padded_size());
  }
  const std::int64_t root = blocks.front();
  blocks.erase(blocks.begin());
  std::sort(blocks.rbegin(), blocks.rend());
  // Units gathered at the same time: the root, the block in use, and the blocks gathered ahead.
  // Units with full gradients: the root, the block in use, and the block being reduced.
  const auto largest = [&](std::int64_t count) {
    std::int64_t sum = root;
    for (std::size_t i = 0; i < std::min(static_cast<std::size_t>(count), blocks.size()); ++i)
      sum += blocks[i];
    return sum;
  };
  const std::int64_t whole = largest(2);
  const std::int64_t gathered = largest(1 + setup.config.shard.gather_ahead);

  // Accumulating over micro-batches needs a second gradient segment, for one unit at a time.
  std::int64_t arriving = 0;
  if (scatters && setup.config.train.global_batch / world_size > setup.config.train.micro_batch) {
    for (const ShardLayout& unit : units) arriving = std::max(arriving, held_of(unit));
  }

  of(plan, MemoryCategory::Parameters) = held * master_size;
  of(plan, MemoryCategory::OptimizerState) = held * 8;
  of(plan, MemoryCategory::Gradients) = scatters ? (held + whole + arriving) * 4 : padded * 4;
  // Sampling text at evaluations gathers the whole model.
  const bool samples = !setup.config.train.sample_prompt.empty();
  if (scatters) of(plan, MemoryCategory::Gathered) = (samples ? padded : gathered) * compute_size;
  if (!scatters && compute_size != master_size)
    of(plan, MemoryCategory::Gathered) = padded * compute_size;
  of(plan, MemoryCategory::Activations) = plan_activations(setup, bf16 ? DType::BF16 : DType::F32);
  if (saves_beside_training(setup.config, setup.state.step)) {
    const std::int64_t moments = setup.config.checkpoint.what == "all" ? 8 : 0;
    // Staging pads tensors to cache lines; segment_size() includes at least as much padding.
    for (const ShardLayout& unit : units)
      of(plan, MemoryCategory::Staging) += unit.segment_size() * (master_size + moments);
  }
  of(plan, MemoryCategory::Data) =
      2 * 4 * setup.config.train.micro_batch * setup.config.model.seq_len;
  // The communicator's shared memory is already allocated.
  of(plan, MemoryCategory::Communication) =
      context.ledger().usage(MemoryCategory::Communication).current;
  return plan;
}

std::int64_t total(const MemoryPlan& plan) {
  return std::accumulate(plan.begin(), plan.end(), std::int64_t{0});
}

std::string describe(const MemoryPlan& plan) {
  std::string text;
  for (std::size_t c = 0; c < plan.size(); ++c) {
    if (plan[c] == 0) continue;
    text +=
        fmt::format("{}{} {}", text.empty() ? "" : ", ",
                    memory_category_name(static_cast<MemoryCategory>(c)), format_bytes(plan[c]));
  }
  return text;
}

std::string check_memory(const MemoryNeed& need, const MemoryAdvice& advice, bool refuse) {
  const SystemMemory& memory = need.memory;
  const std::int64_t bytes = total(need.plan) * need.ranks;
  if (memory.total <= 0 || bytes <= memory.available) return {};
  std::string text = fmt::format(
      "{} up to {} of memory, and {} {}{}; a rank's share: {}",
      need.ranks == 1 ? "this run needs" : fmt::format("the {} ranks here need", need.ranks),
      format_bytes(bytes), need.there, format_bytes(memory.total),
      memory.available < memory.total
          ? fmt::format(" ({} of it free now)", format_bytes(memory.available))
          : std::string(),
      describe(need.plan));
  if (refuse && bytes > memory.total)
    throw OutOfMemory("{}", advice.after(text + ". Nothing was started; to start anyway, use "
                                                "--train.memory_check warn"));
  return text;
}

}  // namespace tessera::tools
