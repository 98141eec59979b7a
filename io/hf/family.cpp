#include "io/hf/family.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "io/hf/gpt2_source.h"

namespace tessera::io {
namespace {

template <typename Source>
std::unique_ptr<ModelSource> open(std::unique_ptr<ShardedSource> source, Json model,
                                  const NameRules& rules, LoadPolicy policy) {
  return std::make_unique<Source>(std::move(source), std::move(model), rules, policy);
}

constexpr HfFamily kFamilies[] = {{"gpt2", gpt2_config_from_hf, gpt2_config_to_hf, gpt2_name_to_hf,
                                   gpt2_name_from_hf, open<Gpt2Source>}};

}  // namespace

const HfFamily* find_hf_family(std::string_view name) {
  const auto* const found = std::ranges::find(kFamilies, name, &HfFamily::name);
  return found == std::end(kFamilies) ? nullptr : found;
}

const HfFamily* hf_family_of(const Json& config) {
  if (!config.is_object()) return nullptr;
  const auto type = config.find("model_type");
  if (type == config.end() || !type->is_string()) return nullptr;
  return find_hf_family(type->get_ref<const std::string&>());
}

}  // namespace tessera::io
