#include "core/nn/units.h"

#include <algorithm>

namespace tessera {
namespace {

bool has_list(const nn::Module& module) {
  return module.is_list() || std::any_of(module.children().begin(), module.children().end(),
                                         [](const nn::Module* child) { return has_list(*child); });
}

void add_units(const nn::Module& module, std::vector<Unit>& units) {
  const auto add = [&](const nn::Module& m, const std::vector<Parameter*>& parameters) {
    if (!parameters.empty()) units.push_back({m.path().empty() ? "root" : m.path(), parameters});
  };
  if (module.is_list()) {
    for (const nn::Module* block : module.children()) add(*block, block->parameters());
  } else if (has_list(module) || module.path().empty()) {
    add(module, module.own_parameters());
    for (const nn::Module* child : module.children()) add_units(*child, units);
  } else {
    add(module, module.parameters());
  }
}

}  // namespace

std::vector<Unit> units_of(const nn::Module& model) {
  std::vector<Unit> units;
  add_units(model, units);
  return units;
}

ShardLayout layout_of(const Unit& unit, int world_size) {
  std::vector<ShardLayout::Parameter> parameters;
  for (const Parameter* p : unit.parameters)
    parameters.push_back({p->name, p->tensor.shape(), p->decay});
  return ShardLayout(unit.name, parameters, world_size);
}

}  // namespace tessera
