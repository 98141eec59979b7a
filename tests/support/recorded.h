#pragma once

#include <functional>
#include <utility>

#include "core/autograd/autograd.h"

namespace tessera::test {

/// y = x as a recorded operation, which calls `on_backward` when backward reaches it; recorded even
/// if x requires no gradient.
inline Tensor recorded(
    const Tensor& x, std::function<void()> on_backward = [] {}) {
  Tensor y = x.detach();
  autograd::record(
      "recorded", y, {x},
      [on_backward = std::move(on_backward)](const Tensor& grad_y, autograd::InputGradients& into) {
        on_backward();
        into.pass(0, grad_y);
      },
      true);
  return y;
}

/// autograd::recompute of a function of one tensor.
inline Tensor recompute(std::function<Tensor(const Tensor&)> function, const Tensor& x) {
  return autograd::recompute(
      [function = std::move(function)](std::span<const Tensor> in) { return function(in[0]); },
      {x});
}

}  // namespace tessera::test
