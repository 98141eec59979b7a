#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/memory.h"
#include "models/language_model.h"
#include "models/presets.h"
#include "tools/tessera/command.h"

namespace tessera::tools {
namespace {

// Bytes of a parameter while it trains: float32 weight, gradient and two moments.
constexpr std::int64_t kTrained = 16;

int list(bool json) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  if (!json)
    fmt::print("{:<14} {:<9} {:>14} {:>14} {:>6} {:>6} {:>9} {:>9} {:>10}  {}\n", "preset",
               "family", "parameters", "active", "layers", "width", "positions", "bf16", "training",
               "source");
  for (const models::Preset& preset : models::presets()) {
    const models::Arch arch = models::arch_of_preset(preset.name);
    const std::int64_t count = models::make_model(arch)->parameter_count();
    const std::int64_t active = arch.active_parameters(count);
    if (json) {
      all.push_back({{"preset", preset.name},
                     {"family", arch.family},
                     {"source", preset.source},
                     {"parameters", count},
                     {"active_parameters", active},
                     {"bf16_bytes", 2 * count},
                     {"training_bytes", kTrained * count},
                     {"model", nlohmann::ordered_json::parse(models::to_json(arch))}});
    } else {
      fmt::print("{:<14} {:<9} {:>14} {:>14} {:>6} {:>6} {:>9} {:>9} {:>10}  {}\n", preset.name,
                 arch.family, count, active, arch.n_layer, arch.n_embd, arch.seq_len,
                 format_bytes(2 * count), format_bytes(kTrained * count), preset.source);
    }
  }
  if (json)
    std::cout << all.dump() << '\n';
  else
    std::cout << "\nactive: parameters that compute a token. bf16: the weights. training: float32 "
                 "weights, gradients and AdamW's moments, over "
                 "all ranks;\n`tessera plan --model.preset NAME` adds activations.\n";
  return 0;
}

}  // namespace

Command add_models(CLI::App& parent) {
  CLI::App* app =
      parent.add_subcommand("models", "List the presets of known models, with their sizes");
  const auto json = std::make_shared<bool>(false);
  app->add_flag("--json", *json, "One JSON array on standard output");
  return {app, [json] { return list(*json); }};
}

}  // namespace tessera::tools
