#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace tessera::nn {

class Module;

/// Activation recomputation: which activations backward computes again instead of keeping them.
struct Recompute {
  enum Part : std::uint8_t {
    None,
    Cheap,  ///< results of norms, GELU, SiLU, and products element by element
    Mlp,    ///< these, and keep only the inputs of MLPs
    Block,  ///< keep only the inputs of blocks
  };
  /// @throws InvalidArgument unless every >= 1
  Recompute(Part which = None, std::int64_t every_nth = 1);
  bool operator==(const Recompute&) const = default;

  Part part;
  std::int64_t every;  ///< with Block: blocks 0, every, 2 every, ... of each list, from 1
};

/// "none", "cheap", "mlp", "block" or "every N". @throws InvalidArgument for other texts
Recompute parse_recompute(std::string_view text);

/// forward(inputs), computed again in backward where the model's setting is Recompute::Mlp. For MLPs.
/// @param inputs  the first is defined
Tensor recompute_mlp(const Module& mlp, const std::vector<Tensor>& inputs,
                     const std::function<Tensor(std::span<const Tensor>)>& forward);
/// The same for several results.
std::vector<Tensor> recompute_mlp(
    const Module& mlp, const std::vector<Tensor>& inputs,
    const std::function<std::vector<Tensor>(std::span<const Tensor>)>& forward);

}  // namespace tessera::nn
