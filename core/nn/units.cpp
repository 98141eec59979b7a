#include "core/nn/units.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <unordered_map>

#include "core/base/error.h"

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

bool matches(const std::string& pattern, const std::string& path) {
  std::string parts[] = {pattern, path};
  for (std::string& text : parts) std::replace(text.begin(), text.end(), '.', '/');
  return ::fnmatch(parts[0].c_str(), parts[1].c_str(), FNM_PATHNAME | FNM_NOESCAPE) == 0;
}

// All modules below the root, outer ones first.
void add_modules(const nn::Module& module, std::vector<const nn::Module*>& modules) {
  for (const nn::Module* child : module.children()) {
    modules.push_back(child);
    add_modules(*child, modules);
  }
}

// "wte, h, h.*, h.*.mlp": paths with parameters, where * stands for the number of a block.
std::string known_paths(const std::vector<const nn::Module*>& modules) {
  constexpr std::size_t kMost = 24;
  std::vector<std::string> known;
  std::unordered_map<const nn::Module*, std::string> paths;
  for (const nn::Module* module : modules) {
    const std::string& path = paths.emplace(module, module->path()).first->second;
    for (const nn::Module* child : module->children()) {
      const std::string name = child->path().substr(module->path().size() + 1);
      paths.emplace(child, path + "." + (module->is_list() ? "*" : name));
    }
    if (!module->parameters().empty() && std::find(known.begin(), known.end(), path) == known.end())
      known.push_back(path);
  }
  const std::size_t shown = std::min(known.size(), kMost);
  return fmt::format("{}{}",
                     fmt::join(known.begin(), known.begin() + static_cast<long>(shown), ", "),
                     shown < known.size() ? fmt::format(" and {} more", known.size() - shown) : "");
}

// Gives modules that match a pattern units of their own; of nested ones the innermost.
std::vector<Unit> split_by_patterns(const nn::Module& model, const std::vector<Unit>& units,
                                    const std::vector<std::string>& patterns) {
  std::vector<const nn::Module*> modules;
  add_modules(model, modules);
  std::unordered_map<const Parameter*, const nn::Module*> module_of;
  for (const std::string& pattern : patterns) {
    const bool any = std::any_of(modules.begin(), modules.end(), [&](const nn::Module* m) {
      return !m->parameters().empty() && matches(pattern, m->path());
    });
    require(any, "no module matches '{}' of shard.units; there are {}", pattern,
            known_paths(modules));
  }
  for (const nn::Module* module : modules) {
    const bool own = std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
      return matches(pattern, module->path());
    });
    for (const Parameter* p : module->parameters())
      if (own) module_of[p] = module;
  }
  std::vector<Unit> result;
  std::unordered_map<const nn::Module*, std::size_t> index_of;
  for (const Unit& unit : units) {
    const std::size_t rest = result.size();
    result.push_back({unit.name, {}});
    for (Parameter* p : unit.parameters) {
      std::size_t index = rest;
      if (const auto found = module_of.find(p); found != module_of.end()) {
        const auto [at, is_new] = index_of.emplace(found->second, result.size());
        if (is_new) result.push_back({found->second->path(), {}});
        index = at->second;
      }
      result[index].parameters.push_back(p);
    }
  }
  std::erase_if(result, [](const Unit& unit) { return unit.parameters.empty(); });
  return result;
}

std::vector<Unit> merge_by_size(const std::vector<Unit>& units, std::int64_t least) {
  std::vector<Unit> result;
  std::string first;
  std::int64_t count = least;
  for (const Unit& unit : units) {
    if (count >= least) {
      result.push_back({first = unit.name, {}});
      count = 0;
    } else {
      result.back().name = first + ".." + unit.name;
    }
    for (Parameter* p : unit.parameters) {
      result.back().parameters.push_back(p);
      count += p->tensor.numel();
    }
  }
  return result;
}

}  // namespace

std::vector<Unit> units_of(const nn::Module& model, const nn::UnitPolicy& policy) {
  require(policy.least_parameters >= 0 && (policy.least_parameters == 0 || policy.patterns.empty()),
          "a unit policy has a number of parameters, 0 or more, or patterns; not both");
  std::vector<Unit> units;
  add_units(model, units);
  if (!policy.patterns.empty()) units = split_by_patterns(model, units, policy.patterns);
  if (policy.least_parameters > 0) units = merge_by_size(units, policy.least_parameters);
  return units;
}

ShardLayout layout_of(const Unit& unit, int world_size) {
  std::vector<ShardLayout::Parameter> parameters;
  for (const Parameter* p : unit.parameters)
    parameters.push_back({p->name, p->tensor.shape(), p->decay, p->lr_scale, p->is_matrix});
  return ShardLayout(unit.name, parameters, world_size);
}

}  // namespace tessera
