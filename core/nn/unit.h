#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/nn/module.h"

namespace tessera::nn {

/// Floating dtypes that a unit's inputs and its results are converted to; none: left as they are.
struct UnitPrecision {
  std::optional<DType> input = {}, output = {};
};

/// Callbacks around nn::unit, such as those that gather parameters.
class UnitRuntime {
 public:
  virtual ~UnitRuntime() = default;
  virtual UnitPrecision precision() const { return {}; }
  /// Whether the module's parameters are gathered without those of other modules.
  virtual bool gathers_alone(const Module& /*module*/) { return false; }
  /// Called before the forward pass of `modules`, whose parameters it may then read.
  /// @return the scope of the operations of this run; null: none
  virtual std::shared_ptr<autograd::Scope> before_forward(std::span<Module* const> modules) = 0;
  /// Called after the forward pass that before_forward() returned `scope` for.
  virtual void after_forward(std::span<Module* const> modules,
                             const std::shared_ptr<autograd::Scope>& scope) = 0;
};

namespace detail {

std::vector<Tensor> run_unit(
    std::initializer_list<Module*> modules,
    const std::function<std::vector<Tensor>(std::span<const Tensor>)>& function,
    std::vector<Tensor> inputs);

/// Calls f with `arguments`, where the tensors among them are replaced by those of `inputs`.
template <typename F, typename... Arguments>
auto call_with(F& f, std::span<const Tensor> inputs, Arguments&... arguments) {
  std::size_t next = 0;
  const auto replace = [&]<typename A>(A& argument) -> decltype(auto) {
    if constexpr (std::is_same_v<std::remove_cv_t<A>, Tensor>)
      return inputs[next++];
    else
      return (argument);
  };
  // Braces: from left to right.
  return std::apply(f, std::tuple<decltype(replace(arguments))...>{replace(arguments)...});
}

template <typename R>
std::vector<Tensor> as_list(R results) {
  if constexpr (std::is_same_v<R, std::vector<Tensor>>)
    return results;
  else if constexpr (std::is_same_v<R, Tensor>)
    return {std::move(results)};
  else
    return std::apply([](auto&... y) { return std::vector<Tensor>{std::move(y)...}; }, results);
}

template <typename R>
R from_list(std::vector<Tensor> list) {
  if constexpr (std::is_same_v<R, std::vector<Tensor>>)
    return list;
  else if constexpr (std::is_same_v<R, Tensor>)
    return std::move(list.front());
  else
    return [&]<std::size_t... i>(std::index_sequence<i...>) { return R{std::move(list[i])...}; }
  (std::make_index_sequence<std::tuple_size_v<R>>());
}

}  // namespace detail

/// Runs f(arguments...), which reads the parameters of `modules`, as one unit: they may be gathered
/// for it, released after it, and its results computed again in backward. A parameter that is
/// sharded can be read within a unit only. Units may run any number of times, in any order and
/// within one another, but alike on all ranks.
/// @param f  returns a Tensor, or several as std::pair, std::tuple, std::array or std::vector
/// @param arguments  taken by value; tensors among them are its differentiable inputs
template <typename F, typename... Arguments>
auto unit(std::initializer_list<Module*> modules, F f, Arguments... arguments) {
  using Result = std::decay_t<std::invoke_result_t<F&, Arguments&...>>;
  std::vector<Tensor> inputs;
  const auto collect = [&]<typename A>(A& argument) {
    if constexpr (std::is_same_v<A, Tensor>) inputs.push_back(std::exchange(argument, Tensor()));
  };
  (collect(arguments), ...);
  return detail::from_list<Result>(detail::run_unit(
      modules,
      [=](std::span<const Tensor> tensors) mutable {
        return detail::as_list<Result>(detail::call_with(f, tensors, arguments...));
      },
      std::move(inputs)));
}

/// module(arguments...) as a unit of the module's parameters.
template <typename M, typename... Arguments>
requires std::is_base_of_v<Module, M>
auto unit(M& module, Arguments... arguments) {
  return unit({&module}, std::ref(module), std::move(arguments)...);
}

}  // namespace tessera::nn
