#include "core/nn/unit.h"

#include <algorithm>
#include <optional>

#include "core/ops/elementwise.h"

namespace tessera::nn::detail {
namespace {

// While it lives, cheap results need not be kept for backward. Those that are still there at its end are kept by
// what saves them later, which may read them while the parameters of this unit are sharded.
class CheapResults {
 public:
  CheapResults(Context& context, bool recomputes)
      : context_(context), before_(context.cheap_results()) {
    context.set_cheap_results(recomputes ? &results_ : nullptr);
  }
  ~CheapResults() {
    context_.set_cheap_results(before_);
    for (const std::weak_ptr<Storage>& result : results_)
      if (const auto storage = result.lock()) storage->set_saved_as(nullptr);
  }
  CheapResults(const CheapResults&) = delete;
  CheapResults& operator=(const CheapResults&) = delete;

 private:
  Context& context_;
  std::vector<std::weak_ptr<Storage>>* const before_;
  std::vector<std::weak_ptr<Storage>> results_;
};

}  // namespace

std::vector<Tensor> run_unit(
    std::initializer_list<Module*> list,
    const std::function<std::vector<Tensor>(std::span<const Tensor>)>& function,
    std::vector<Tensor> inputs) {
  const std::span<Module* const> modules(list.begin(), list.size());
  require(!modules.empty(), "nn::unit needs at least one module");
  const auto first =
      std::find_if(inputs.begin(), inputs.end(), [](const Tensor& t) { return t.defined(); });
  require(first != inputs.end(), "nn::unit of '{}' needs at least one input tensor",
          modules.front()->path());
  Context& context = *first->context();
  UnitRuntime* const runtime = modules.front()->unit_runtime();
  const UnitPrecision precision = runtime == nullptr ? UnitPrecision() : runtime->precision();
  const auto round = [](Tensor& tensor, std::optional<DType> dtype) {
    if (dtype && tensor.defined() && is_floating(tensor.dtype()))
      tensor = ops::cast(tensor, *dtype);
  };
  for (Tensor& input : inputs) round(input, precision.input);
  std::shared_ptr<autograd::Scope> scope;
  if (runtime != nullptr) scope = runtime->before_forward(modules);
  std::vector<Tensor> results;
  {
    std::optional<autograd::ScopeGuard> guard;
    if (scope) guard.emplace(context, scope);
    // Without gradients, recomputation would record an operation for nothing.
    const auto any = [&](auto wants) { return std::any_of(modules.begin(), modules.end(), wants); };
    const bool again = any([](const Module* m) { return m->is_recomputed(); }) &&
                       (any([](const Module* m) { return m->is_trainable(); }) ||
                        std::any_of(inputs.begin(), inputs.end(), [](const Tensor& t) {
                          return t.defined() && t.requires_grad();
                        }));
    const Recompute::Part part = modules.front()->recompute().part;
    const CheapResults cheap(
        context, (part == Recompute::Cheap || part == Recompute::Mlp) && !context.is_recomputing());
    results = again ? autograd::recompute(function, std::move(inputs)) : function(inputs);
  }
  if (runtime != nullptr && context.is_recomputing())
    for (const Tensor& y : results)
      if (y.defined()) (void)y.view();  // a late result reads the unit's parameters
  if (runtime != nullptr) runtime->after_forward(modules, scope);
  for (Tensor& y : results) round(y, precision.output);
  return results;
}

}  // namespace tessera::nn::detail
