#include "tools/tessera/train/memory_advice.h"

#include <fmt/format.h>

#include <string_view>

#include "core/base/error.h"
#include "core/base/memory.h"

namespace tessera::tools {
namespace {

/// The largest divisor of `value` below `wish`; 0: none.
std::int64_t next_divisor_below(std::int64_t value, std::int64_t wish) {
  for (std::int64_t divisor = wish - 1; divisor > 0; --divisor)
    if (value % divisor == 0) return divisor;
  return 0;
}

/// The fewest ranks above `world_size` that divide the batch; 0: none.
std::int64_t more_ranks(const Config& config, std::int64_t world_size) {
  const std::int64_t batch = config.train.global_batch;
  const std::int64_t unit =
      config.given.contains("train.micro_batch") ? config.train.micro_batch : 1;
  for (std::int64_t ranks = world_size + 1; ranks * unit <= batch; ++ranks)
    if (batch % (ranks * unit) == 0) return ranks;
  return 0;
}

}  // namespace

std::vector<MemoryChange> memory_changes(const Config& config, int world_size,
                                         const PlanPeak& peak) {
  std::vector<MemoryChange> changes;
  const std::optional<std::int64_t> now = peak(config);
  const auto attempt = [&](const std::string& flags, const std::string& why, const auto& change) {
    Config other = config;
    change(other);
    if (const auto planned = peak(other); planned && now && *planned < *now)
      changes.push_back({flags, why, *planned});
  };
  if (const auto rows =
          next_divisor_below(config.train.global_batch / world_size, config.train.micro_batch);
      rows > 0) {
    attempt(fmt::format("--train.micro_batch {}", rows),
            fmt::format("activations of {} sequences at a time, not of {}", rows,
                        config.train.micro_batch),
            [rows](Config& c) { c.train.micro_batch = rows; });
  }
  if (config.train.recompute == "none")
    attempt("--train.recompute cheap", "results of norms and activations, computed twice",
            [](Config& c) { c.train.recompute = "cheap"; });
  if (config.train.recompute == "none" || config.train.recompute == "cheap")
    attempt("--train.recompute mlp", "activations of MLPs are computed twice",
            [](Config& c) { c.train.recompute = "mlp"; });
  if (config.train.recompute != "block")
    attempt("--train.recompute block", "activations of one block at a time, computed twice",
            [](Config& c) { c.train.recompute = "block"; });
  if (config.shard.mode != "full" && world_size > 1) {
    attempt(config.shard.group > 0 ? "--shard.mode full --shard.group 0" : "--shard.mode full",
            fmt::format("1/{} of weights, gradients and optimizer state on each rank", world_size),
            [](Config& c) { c.shard.mode = "full", c.shard.group = 0; });
  }
  if (config.train.precision == "fp32")
    attempt("--train.precision bf16", "activations of half the size",
            [](Config& c) { c.train.precision = "bf16"; });
  if (config.train.precision != "bf16-true")
    attempt("--train.precision bf16-true", "weights of half the size too, rounded stochastically",
            [](Config& c) { c.train.precision = "bf16-true"; });
  if (config.shard.offload == "none")
    attempt("--shard.offload optimizer", "master weights and optimizer state in host memory",
            [](Config& c) { c.shard.offload = "optimizer"; });
  return changes;
}

MemoryAdvice memory_advice(const Config& config, int world_size, DeviceType device,
                           const PlanPeak& peak) {
  MemoryAdvice advice;
  for (const MemoryChange& change : memory_changes(config, world_size, peak))
    advice.add(change.flags, fmt::format("{} per rank: {}", format_bytes(change.peak), change.why));
  // On the CPU more ranks don't help: all share the host's memory.
  if (const auto ranks = more_ranks(config, world_size); device == DeviceType::CUDA && ranks > 0)
    advice.add(fmt::format("--nproc {}", ranks), "more ranks, one per GPU");
  return advice;
}

int with_memory_advice(const Config& config, int world_size, const Context& context,
                       const PlanPeak& peak, const std::function<int()>& work) {
  try {
    return work();
  } catch (const OutOfMemory& error) {
    const std::string text = with_ledger(error.what(), context.ledger());
    const DeviceType device = context.device().type;
    // With a GPU, host memory holds copies, and what is offloaded.
    const bool of_host = text.find("host memory is exhausted") != std::string::npos;
    if (device == DeviceType::CUDA && of_host) {
      MemoryAdvice advice;
      if (config.shard.offload != "none")
        advice.add("--shard.offload none", "optimizer state on the GPU");
      throw OutOfMemory("{}", advice.after(text));
    }
    // Nothing is planned where the system refused memory: oneDNN, which a plan asks, can crash then.
    if (of_host && text.find(" of a limit of ") == std::string::npos)
      throw OutOfMemory(
          "{}{}The system has no more memory for this process; `ulimit -a` shows its limits. "
          "`tessera plan` with the same flags says what the run takes, and what would reduce that",
          text, text.ends_with('\n') ? "" : "\n");
    throw OutOfMemory("{}", memory_advice(config, world_size, device, peak).after(text));
  }
}

}  // namespace tessera::tools
