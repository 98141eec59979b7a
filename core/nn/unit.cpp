#include "core/nn/unit.h"

#include <algorithm>
#include <optional>

namespace tessera::nn::detail {
namespace {

// Otherwise backward has nothing to do here, and recomputation would record an operation for it.
bool needs_grad(std::span<Module* const> modules, const std::vector<Tensor>& inputs) {
  const auto wants = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
  return std::any_of(inputs.begin(), inputs.end(), wants) ||
         std::any_of(modules.begin(), modules.end(), [&](const Module* m) {
           return std::any_of(m->parameters().begin(), m->parameters().end(),
                              [&](const Parameter* p) { return wants(p->tensor); });
         });
}

}  // namespace

Tensor run_unit(std::span<Module* const> modules,
                const std::function<Tensor(std::span<const Tensor>)>& function,
                std::vector<Tensor> inputs) {
  require(!modules.empty(), "nn::unit needs at least one module");
  const auto first =
      std::find_if(inputs.begin(), inputs.end(), [](const Tensor& t) { return t.defined(); });
  require(first != inputs.end(), "nn::unit of '{}' needs at least one input tensor",
          modules.front()->path());
  Context& context = *first->context();
  UnitRuntime* const runtime = modules.front()->unit_runtime();
  std::shared_ptr<autograd::Scope> scope;
  if (runtime != nullptr) scope = runtime->before_forward(modules);
  Tensor y;
  {
    std::optional<autograd::ScopeGuard> guard;
    if (scope) guard.emplace(context, scope);
    const bool again = std::any_of(modules.begin(), modules.end(),
                                   [](const Module* m) { return m->is_recomputed(); }) &&
                       needs_grad(modules, inputs);
    y = again ? autograd::recompute(function, std::move(inputs)) : function(inputs);
  }
  if (runtime != nullptr) runtime->after_forward(modules, scope);
  return y;
}

}  // namespace tessera::nn::detail
