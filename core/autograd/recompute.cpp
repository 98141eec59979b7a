#include "core/autograd/node.h"
#include "kernels/elementwise.h"

namespace tessera::autograd {
namespace {

// Runs block again on a leaf with x's contents, whose gradient is written to x's destination.
void backward_again(const std::function<Tensor(const Tensor&)>& block, const Tensor& x,
                    const Tensor& grad_y, InputGradients& into) {
  const std::shared_ptr<Context>& context = x.context();
  const std::uint64_t oldest = context->next_sequence();
  Tensor leaf = x.detach();
  const GradientView place = into.target(0);
  if (place) {
    auto memory = Storage::wrap(context, place.view.data, place.view.bytes(), nullptr);
    leaf.set_requires_grad(true);
    leaf.set_grad_buffer(Tensor::window(std::move(memory), 0, leaf.shape(), leaf.dtype()));
    leaf.impl()->has_grad = place.accumulate;
  }
  Tensor y;
  {
    const GradModeGuard on(*context, true);
    y = block(leaf);
  }
  require(y.shape() == grad_y.shape() && y.dtype() == grad_y.dtype(),
          "recompute: the block gave {} {} in forward and {} {} when run again", grad_y.shape(),
          grad_y.dtype(), y.shape(), y.dtype());
  if (y.requires_grad()) run_backward(y, grad_y, oldest);
  if (place && !leaf.impl()->has_grad) kernels::fill(*context, place.view, 0.0);
}

}  // namespace

Tensor recompute(std::function<Tensor(const Tensor&)> block, const Tensor& x) {
  Context& context = *x.context();
  if (!context.grad_enabled()) return block(x);
  Tensor y;
  {
    const NoGradGuard off(context);
    y = block(x).detach();  // the block may return x itself
  }
  record(
      "recompute", y, {x},
      [block = std::move(block), x = SavedTensor(x)](const Tensor& grad_y, InputGradients& into) {
        backward_again(block, x.get("recompute"), grad_y, into);
      },
      true);
  return y;
}

}  // namespace tessera::autograd
