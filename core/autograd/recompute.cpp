#include <algorithm>

#include "core/autograd/node.h"
#include "kernels/elementwise.h"

namespace tessera::autograd {
namespace {

using Function = std::function<Tensor(std::span<const Tensor>)>;

// A leaf with the contents of `input`, whose gradient is written to `place`.
Tensor leaf_of(const Tensor& input, const GradientView& place) {
  Tensor leaf = input.detach();
  if (!place) return leaf;
  auto memory = Storage::wrap(input.context(), place.view.data, place.view.bytes(), nullptr);
  leaf.set_requires_grad(true);
  leaf.set_grad_buffer(Tensor::window(std::move(memory), 0, leaf.shape(), leaf.dtype()));
  leaf.impl()->has_grad = place.accumulate;
  return leaf;
}

void run_again(const Function& function, std::span<const SavedTensor> saved, const Tensor& grad_y,
               InputGradients& into) {
  const std::shared_ptr<Context>& context = grad_y.context();
  const std::uint64_t oldest = context->next_sequence();
  std::vector<GradientView> places;
  std::vector<Tensor> leaves;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    places.push_back(into.target(static_cast<int>(i)));
    leaves.push_back(saved[i].defined() ? leaf_of(saved[i].get("recompute"), places.back())
                                        : Tensor());
  }
  Tensor y;
  {
    const GradModeGuard on(*context, true);
    y = function(leaves);
  }
  require(y.shape() == grad_y.shape() && y.dtype() == grad_y.dtype(),
          "recompute: the function gave {} {} in forward and {} {} when run again", grad_y.shape(),
          grad_y.dtype(), y.shape(), y.dtype());
  if (y.requires_grad()) run_backward(y, grad_y, oldest);
  for (std::size_t i = 0; i < places.size(); ++i)
    if (places[i] && !leaves[i].impl()->has_grad) kernels::fill(*context, places[i].view, 0.0);
}

}  // namespace

Tensor recompute(Function function, std::vector<Tensor> inputs) {
  const auto first =
      std::find_if(inputs.begin(), inputs.end(), [](const Tensor& t) { return t.defined(); });
  require(first != inputs.end(), "recompute needs at least one input tensor");
  Context& context = *first->context();
  if (!context.grad_enabled()) return function(inputs);
  Tensor y;
  {
    const NoGradGuard off(context);
    y = function(inputs).detach();  // the function may return an input itself
  }
  std::vector<SavedTensor> saved;
  for (const Tensor& input : inputs)
    saved.push_back(input.defined() ? SavedTensor(input) : SavedTensor());
  record(
      "recompute", y, inputs,
      [function = std::move(function), saved = std::move(saved)](
          const Tensor& grad_y, InputGradients& into) { run_again(function, saved, grad_y, into); },
      true);
  return y;
}

}  // namespace tessera::autograd
