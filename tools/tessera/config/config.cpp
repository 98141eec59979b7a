#include "tools/tessera/config/config.h"

#include <nlohmann/json.hpp>

#include "core/base/choose_device.h"
#include "core/base/error.h"
#include "core/nn/recompute.h"
#include "core/nn/unit_policy.h"
#include "models/language_model.h"
#include "tools/tessera/config/fields.h"

namespace tessera::tools {
namespace {

/// "8 or 16": the multiples of `unit` next to `value`.
std::string nearest_multiples(std::int64_t value, std::int64_t unit) {
  const std::int64_t below = value / unit * unit;
  return below > 0 ? fmt::format("{} or {}", below, below + unit) : fmt::format("{}", below + unit);
}

/// "3 or 6": the divisors of `value` next to `wish`.
std::string nearest_divisors(std::int64_t value, std::int64_t wish) {
  std::int64_t below = std::min(wish, value);
  while (value % below != 0) --below;
  if (wish >= value) return fmt::format("{}", below);
  std::int64_t above = wish;
  while (value % above != 0) ++above;
  return fmt::format("{} or {}", below, above);
}

void check_batches(Config::Train& train, std::int64_t world) {
  require(train.global_batch % world == 0,
          "train.global_batch is {}, which {} ranks cannot share equally; the nearest values that "
          "fit are {}",
          train.global_batch, world, nearest_multiples(train.global_batch, world));
  const std::int64_t per_rank = train.global_batch / world;
  if (train.micro_batch == 0) train.micro_batch = per_rank;
  require(
      per_rank % train.micro_batch == 0,
      "train.global_batch {} over {} ranks gives {} sequences per rank, which is not a multiple of "
      "train.micro_batch {}; the nearest values that fit are train.micro_batch {}, or "
      "train.global_batch {}",
      train.global_batch, world, per_rank, train.micro_batch,
      nearest_divisors(per_rank, train.micro_batch),
      nearest_multiples(train.global_batch, world * train.micro_batch));
}

}  // namespace

void Config::validate(int world_size, bool needs_data) {
  require(shard.offload == "none" || train.precision != "bf16-true",
          "shard.offload {} needs float32 master weights, and train.precision is bf16-true; use "
          "--train.precision bf16",
          shard.offload);
  require(world_size >= 1, "the number of ranks must be at least 1, got {}", world_size);
  models::require_family(model.arch, "model.arch");
  require(model.head_dim != 0 || model.n_embd % model.n_head == 0,
          "model.n_head {} does not divide model.n_embd {}; the nearest values that fit are "
          "model.n_head {}, or model.n_embd {}",
          model.n_head, model.n_embd, nearest_divisors(model.n_embd, model.n_head),
          nearest_multiples(model.n_embd, model.n_head));
  require(!needs_data || !data.train.empty(),
          "no training data; name a file with --data.train FILE");
  check_batches(train, world_size);
  parse_device(train.device);
  nn::parse_recompute(train.recompute);
  nn::parse_unit_policy(shard.units);
  require(shard.group == 0 || shard.mode == "hybrid",
          "shard.group is for shard.mode hybrid, and the mode is {}", shard.mode);
  require(shard.group == 0 || world_size % shard.group == 0,
          "shard.group {} does not divide the {} ranks", shard.group, world_size);
  require<Unsupported>(comm.backend != "nccl" || train.device != "cpu",
                       "comm.backend nccl is for ranks on GPUs, and train.device is cpu; use shm, "
                       "tcp or auto");
  if (!given.contains("optim.min_lr")) optim.min_lr = optim.lr / 10;
  require(optim.schedule == "constant" || optim.min_lr <= optim.lr,
          "optim.min_lr {} is above optim.lr {}; set --optim.min_lr too, at most {}", optim.min_lr,
          optim.lr, optim.lr);
  require(optim.name != "muon" || lora.rank == 0,
          "optim.name muon is for whole weights, and LoRA trains adapters; set --optim.name adamw");
  require(optim.name != "muon" || shard.offload == "none",
          "optim.name muon gathers whole matrices on the GPU; set --shard.offload none");
  require(optim.ema == 0 || checkpoint.what == "all",
          "optim.ema is saved with the optimizer's state, and checkpoint.what is {}; set "
          "--checkpoint.what all",
          checkpoint.what);
  require(model.preset.empty() || model.init_from.empty(),
          "model.preset is {}, but model.init_from has a model already; leave one of them out",
          model.preset);
  require(
      checkpoint.load_tensors.empty() || !model.init_from.empty(),
      "checkpoint.load_tensors chooses tensors of model.init_from, which is empty; name a source "
      "with --model.init_from, or leave the key out");
  require(!run.out.empty(), "run.out is empty; name a directory with --run.out DIR");
}

nlohmann::ordered_json to_json(const Config& config) {
  Config copy = config;
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  for (const Field& field : fields()) {
    const auto dot = field.key.find('.');
    auto& target =
        out[std::string(field.key.substr(0, dot))][std::string(field.key.substr(dot + 1))];
    std::visit([&](const auto* value) { target = *value; }, field.ref(copy));
  }
  return out;
}

}  // namespace tessera::tools
