#include "models/language_model.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/base/error.h"
#include "models/gpt2.h"

namespace tessera::models {
namespace {

struct Family {
  const char* name;
  std::unique_ptr<LanguageModel> (*make)(const Arch& arch);
};

template <typename M>
std::unique_ptr<LanguageModel> make(const Arch& arch) {
  return std::make_unique<M>(arch);
}

constexpr Family kFamilies[] = {{"gpt2", make<Gpt2>}};

}  // namespace

std::vector<std::string_view> families() {
  std::vector<std::string_view> names;
  for (const Family& family : kFamilies) names.emplace_back(family.name);
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
  const auto* const found = std::ranges::find(kFamilies, arch.family, &Family::name);
  return found->make(arch);
}

}  // namespace tessera::models
