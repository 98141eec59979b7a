#include "comm/sharding/shard_spec.h"

#include "core/base/error.h"

namespace tessera::comm {

void ShardSpec::validate() const {
  const auto is_narrow = [](DType dtype) { return dtype == DType::F32 || dtype == DType::BF16; };
  require(is_narrow(compute), "parameters are gathered in f32 or bf16, got {}", compute);
  require(master == DType::F32 || master == compute,
          "master weights are f32 or of the compute dtype {}, got {}", compute, master);
  require(frozen == DType::F32 || frozen == compute,
          "frozen weights are f32 or of the compute dtype {}, got {}", compute, frozen);
  require(is_narrow(gradient) && is_narrow(reduction),
          "gradients are f32 or bf16, and so is their reduction; got {} and {}", gradient,
          reduction);
  require(!output || is_narrow(*output), "results of units are f32 or bf16, got {}",
          output.value_or(compute));
  require(!offload || master == DType::F32,
          "offloaded master weights are f32, got {}; turn offload or bf16 masters off", master);
  require(gather_ahead >= 0, "gather_ahead must not be negative, got {}", gather_ahead);
  require(tokens >= 0, "tokens of a micro-batch must not be negative, got {}", tokens);
  require(reduce_behind >= 0, "reduce_behind must not be negative, got {}", reduce_behind);
}

ShardSpec shard_spec(std::string_view mode) {
  ShardSpec spec;
  if (mode == "full" || mode == "hybrid") return spec;
  spec.parameters = Hold::Whole;
  if (mode == "gradients") return spec;
  spec.gradients = Hold::Whole;
  require(mode == "optimizer" || mode == "none",
          "shard.mode must be none, optimizer, gradients, full or hybrid, got '{}'", mode);
  return spec;
}

int shard_group_size(std::string_view mode, int world_size, int group) {
  if (mode == "none") return 1;
  return mode == "hybrid" ? group : world_size;
}

}  // namespace tessera::comm
