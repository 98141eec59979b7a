#include "models/language_model.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/base/error.h"
#include "io/hf/family.h"
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
  return std::make_unique<Decoder>(arch);
}

}  // namespace tessera::models
