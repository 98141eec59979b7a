#include "core/nn/unit.h"

#include <algorithm>
#include <optional>

namespace tessera::nn::detail {

Tensor run_unit(std::span<Module* const> modules,
                const std::function<Tensor(std::span<const Tensor>)>& function,
                std::vector<Tensor> inputs) {
  require(!modules.empty(), "nn::unit needs at least one module");
  require(!inputs.empty(), "nn::unit of '{}' needs at least one input tensor",
          modules.front()->path());
  Context& context = *inputs.front().context();
  UnitRuntime* const runtime = modules.front()->unit_runtime();
  std::shared_ptr<autograd::Scope> scope;
  if (runtime != nullptr) scope = runtime->before_forward(modules);
  Tensor y;
  {
    std::optional<autograd::ScopeGuard> guard;
    if (scope) guard.emplace(context, scope);
    const bool again =
        modules.front()->recompute() == Recompute::Block &&
        std::any_of(modules.begin(), modules.end(), [](Module* m) { return m->is_block(); });
    y = again ? autograd::recompute(function, std::move(inputs)) : function(inputs);
  }
  if (runtime != nullptr) runtime->after_forward(modules, scope);
  return y;
}

}  // namespace tessera::nn::detail
