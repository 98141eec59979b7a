#include "models/language_model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/nn/lora.h"
#include "io/hf/family.h"
#include "io/hf/lora.h"
#include "models/decoder.h"

namespace tessera::models {

std::vector<std::string_view> families() {
  std::vector<std::string_view> names;
  for (const io::HfFamily& family : io::hf_families()) names.push_back(family.name);
  return names;
}

void require_family(const std::string& family, const std::string& what) {
  const auto names = families();
  require<Unsupported>(std::ranges::find(names, family) != names.end(),
                       "{} {} is not in this build; it has {}", what, family,
                       fmt::join(names, ", "));
}

std::unique_ptr<LanguageModel> make_model(const Arch& arch) {
  require_family(arch.family, "model.arch");
  auto model = std::make_unique<Decoder>(arch);
  if (!arch.lora) return model;
  std::vector<nn::LoraPlace> places;
  for (const io::LoraLayer& layer :
       io::lora_layers(io::Json::parse(to_json(arch)), arch.lora->targets))
    places.push_back({layer.layer, layer.name, layer.first, layer.count});
  nn::add_lora(*model, places,
               {.rank = arch.lora->rank,
                .scale = arch.lora->alpha / static_cast<double>(arch.lora->rank),
                .dropout = static_cast<float>(arch.lora->dropout)});
  return model;
}

}  // namespace tessera::models
