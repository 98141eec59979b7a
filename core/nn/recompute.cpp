#include "core/nn/recompute.h"

#include <algorithm>
#include <charconv>

#include "core/autograd/autograd.h"
#include "core/nn/module.h"

namespace tessera::nn {

Recompute::Recompute(Part which, std::int64_t every_nth) : part(which), every(every_nth) {
  require(every >= 1, "every {}-th block: expected 1 or more", every);
}

Recompute parse_recompute(std::string_view text) {
  if (text == "none") return Recompute::None;
  if (text == "cheap") return Recompute::Cheap;
  if (text == "mlp") return Recompute::Mlp;
  if (text == "block") return Recompute::Block;
  constexpr std::string_view kEvery = "every ";
  if (text.starts_with(kEvery)) {
    std::int64_t every = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + kEvery.size(), end, every);
    if (error == std::errc() && stop == end && every >= 1) return {Recompute::Block, every};
  }
  throw InvalidArgument(
      "train.recompute must be none, cheap, mlp, block or 'every N' with N from 1, got '{}'", text);
}

std::vector<Tensor> recompute_mlp(
    const Module& mlp, const std::vector<Tensor>& inputs,
    const std::function<std::vector<Tensor>(std::span<const Tensor>)>& forward) {
  const bool differentiates =
      mlp.is_trainable() || std::any_of(inputs.begin(), inputs.end(), [](const Tensor& t) {
        return t.defined() && t.requires_grad();
      });
  const bool again = mlp.recompute().part == Recompute::Mlp &&
                     inputs.front().context()->grad_enabled() && differentiates;
  return again ? autograd::recompute(forward, inputs) : forward(inputs);
}

Tensor recompute_mlp(const Module& mlp, const std::vector<Tensor>& inputs,
                     const std::function<Tensor(std::span<const Tensor>)>& forward) {
  return recompute_mlp(mlp, inputs, std::function([forward](std::span<const Tensor> in) {
                         return std::vector{forward(in)};
                       }))
      .front();
}

}  // namespace tessera::nn
