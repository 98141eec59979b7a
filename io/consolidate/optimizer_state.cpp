#include "io/consolidate/optimizer_state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"

namespace tessera::io {

std::vector<WeightState> weight_states(ConsolidateSource& source) {
  std::map<std::string, WeightState> by_name;
  std::set<std::string> kinds;
  for (ExportTensor& tensor : source.optimizer) {
    require<Unsupported>(!tensor.kind.empty(),
                         "{}: {} is optimizer state of no weight, which torch.optim has no place "
                         "for; write it with --format safetensors",
                         source.path.string(), tensor.source_name);
    const std::string& kind = tensor.kind;
    const std::string name = tensor.weight();
    kinds.insert(kind);
    if (kind == "step" && is_floating(tensor.stored)) tensor.written = DType::F32;
    WeightState& state = by_name[name];
    state.name = name;
    state.moments.emplace_back(kind, &tensor);
    state.decays = state.decays || tensor.shape.size() >= 2;
  }
  const bool has_step = kinds.erase("step") > 0 || source.optimizer_step;
  const bool is_adam = kinds.contains("exp_avg") && kinds.contains("exp_avg_sq") &&
                       !kinds.contains("momentum_buffer");
  if (!is_adam) {
    source.warnings.push_back(fmt::format(
        "the optimizer state of {} is {}, and not AdamW's exp_avg and exp_avg_sq: load it into an "
        "optimizer of the class that saved it",
        source.path.string(), fmt::join(kinds, ", ")));
  } else if (!has_step) {
    source.warnings.push_back(fmt::format(
        "{} does not say how many steps the optimizer made, so the export has no \"step\", "
        "which torch's Adam needs for its bias correction: set it in the program that resumes",
        source.path.string()));
  }
  std::vector<WeightState> states;
  for (const std::string& name : source.parameters) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) continue;
    states.push_back(std::move(found->second));
    by_name.erase(found);
  }
  for (auto& [name, state] : by_name) states.push_back(std::move(state));
  return states;
}

std::vector<ParamGroup> weight_groups(ConsolidateSource& source,
                                      const std::vector<WeightState>& states) {
  using Of = ParamGroup::Of;
  std::map<std::string_view, std::size_t> order;
  for (const std::string& name : source.parameters) order.emplace(name, order.size());
  std::vector<ParamGroup> groups;
  std::set<std::string> grouped;
  bool is_clear = !source.groups.empty();
  for (const ParamGroup& group : source.groups) {
    ParamGroup named{group.settings, Of::Named, group.weights};
    for (const WeightState& state : states)
      if (group.of == Of::All ||
          (group.of != Of::Named && state.decays == (group.of == Of::Matrices)))
        named.weights.push_back(state.name);
    std::ranges::stable_sort(named.weights, {}, [&](const std::string& name) {
      const auto place = order.find(name);
      return place == order.end() ? order.size() : place->second;
    });
    for (const std::string& name : named.weights)
      is_clear = grouped.insert(name).second && is_clear;
    if (!named.weights.empty()) groups.push_back(std::move(named));
  }
  is_clear = is_clear && std::ranges::all_of(states, [&](const WeightState& state) {
               return grouped.contains(state.name);
             });
  if (is_clear) return groups;
  source.warnings.push_back(fmt::format(
      "{} does not say with which learning rate, betas, eps and weight decay the optimizer ran{}, "
      "so the export has none: set them in the program that resumes",
      source.path.string(), source.groups.empty() ? "" : " for each weight"));
  return {};
}

void pickle_setting(PickleWriter& pickle, const Json& value) {
  if (value.is_array()) {
    pickle.begin_tuple();
    for (const Json& item : value) pickle_setting(pickle, item);
    pickle.end_tuple();
  } else if (value.is_string()) {
    pickle.text(value.get_ref<const std::string&>());
  } else if (value.is_boolean()) {
    pickle.boolean(value.get<bool>());
  } else if (value.is_number_float()) {
    pickle.real(value.get<double>());
  } else if (value.is_number_integer()) {
    pickle.integer(value.get<std::int64_t>());
  } else {
    pickle.none();
  }
}

void pickle_names(PickleWriter& pickle, const std::vector<std::string>& names) {
  pickle.begin_list();
  for (const std::string& name : names) pickle.text(name);
  pickle.end_list();
}

std::string step_bytes(std::int64_t step) {
  const auto value = static_cast<float>(step);
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

}  // namespace tessera::io
