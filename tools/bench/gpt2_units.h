#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/shard_layout.h"
#include "io/base/json.h"
#include "io/hf/gpt2.h"

namespace tessera::bench {

/// "model" section of a GPT-2 with about `bytes` of float32 weights.
inline io::Json gpt2_of_size(std::int64_t bytes, std::int64_t width) {
  const std::int64_t vocabulary = 50257, positions = 1024;
  const std::int64_t per_layer = 12 * width * width + 13 * width;
  const std::int64_t rest = bytes / 4 - (vocabulary + positions) * width;
  return {{"arch", "gpt2"},
          {"n_layer", std::max<std::int64_t>(1, (rest + per_layer / 2) / per_layer)},
          {"n_head", std::max<std::int64_t>(1, width / 128)},
          {"n_embd", width},
          {"vocab_size", vocabulary},
          {"seq_len", positions},
          {"layer_norm_eps", 1e-5},
          {"dropout", 0.0}};
}

/// Shard layout of training: one unit per block and one for the rest.
inline std::vector<ShardLayout> gpt2_units(const io::Json& config, int world_size) {
  std::map<std::string, std::vector<ShardLayout::Parameter>> units;
  for (const io::TensorInfo& info : io::gpt2_tensors(config)) {
    const bool block = info.name.starts_with("h.");
    units[block ? info.name.substr(0, info.name.find('.', 2)) : "root"].push_back(
        {info.name, info.shape, false});
  }
  std::vector<ShardLayout> layouts;
  for (const auto& [unit, parameters] : units) layouts.emplace_back(unit, parameters, world_size);
  return layouts;
}

}  // namespace tessera::bench
