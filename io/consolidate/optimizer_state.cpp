#include "io/consolidate/optimizer_state.h"

#include <algorithm>
#include <map>

#include "core/base/error.h"

namespace tessera::io {

std::vector<WeightState> weight_states(ConsolidateSource& source) {
  std::map<std::string, WeightState> by_name;
  for (ExportTensor& tensor : source.optimizer) {
    const std::size_t split = tensor.name.find('/');
    require<Unsupported>(split != std::string::npos,
                         "{}: {} is optimizer state of no weight, which torch.optim has no place "
                         "for; write it with --format safetensors",
                         source.path.string(), tensor.source_name);
    const std::string kind = tensor.name.substr(0, split), name = tensor.name.substr(split + 1);
    if (kind == "step" && is_floating(tensor.stored)) tensor.written = DType::F32;
    WeightState& state = by_name[name];
    state.name = name;
    state.moments.emplace_back(kind, &tensor);
    state.decays = state.decays || tensor.shape.size() >= 2;
  }
  const bool has_step =
      source.optimizer_step || std::ranges::any_of(by_name, [](const auto& entry) {
        return std::ranges::any_of(entry.second.moments,
                                   [](const auto& moment) { return moment.first == "step"; });
      });
  if (!has_step) {
    source.warnings.push_back(fmt::format(
        "{} does not say how many steps the optimizer made, so the export has no \"step\", "
        "which torch's Adam needs for its bias correction: set it in the program that resumes",
        source.path.string()));
  }
  if (!source.adamw) {
    source.warnings.push_back(fmt::format(
        "{} does not say with which learning rate, betas, eps and weight decay the optimizer ran, "
        "so the export has none: set them in the program that resumes",
        source.path.string()));
  }
  std::vector<WeightState> states;
  for (std::size_t i = 0; i < source.parameters.size(); ++i) {
    const auto found = by_name.find(source.parameters[i]);
    if (found == by_name.end()) continue;
    found->second.number = static_cast<std::int64_t>(i);
    states.push_back(std::move(found->second));
    by_name.erase(found);
  }
  for (auto& [name, state] : by_name) states.push_back(std::move(state));
  return states;
}

std::vector<GroupSetting> group_settings(const AdamWSettings& settings, double weight_decay) {
  const auto real = [](double value) {
    return [value](PickleWriter& pickle) { pickle.real(value); };
  };
  const auto boolean = [](bool value) {
    return [value](PickleWriter& pickle) { pickle.boolean(value); };
  };
  const auto none = [](PickleWriter& pickle) { pickle.none(); };
  const auto betas = [settings](PickleWriter& pickle) {
    pickle.begin_tuple();
    pickle.real(settings.beta1);
    pickle.real(settings.beta2);
    pickle.end_tuple();
  };
  return {{"lr", real(settings.lr)},
          {"initial_lr", real(settings.lr)},  // for torch.optim.lr_scheduler
          {"betas", betas},
          {"eps", real(settings.eps)},
          {"weight_decay", real(weight_decay)},
          {"amsgrad", boolean(false)},
          {"maximize", boolean(false)},
          {"foreach", none},
          {"capturable", boolean(false)},
          {"differentiable", boolean(false)},
          {"fused", none},
          {"decoupled_weight_decay", boolean(true)}};
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
