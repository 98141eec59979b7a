#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/nn/layers.h"

namespace tessera::nn {

struct LoraOptions {
  std::int64_t rank = 8;  ///< from 1
  double scale = 1.0;     ///< of the term: alpha / rank
  float dropout = 0.0F;   ///< of the adapter's input, while the model is training; in [0, 1)
};

/// A low-rank adapter, which adds scale * dropout(x) A^T B^T to some outputs of a linear layer.
/// Parameters: A [rank, in], uniform as Kaiming's with a = sqrt(5), and B [outputs, rank], zeros.
/// Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
class LoraAdapter final : public Module {
 public:
  /// An adapter of outputs [first, first + count); made by Linear::add_adapter().
  LoraAdapter(Linear& layer, std::string_view name, std::int64_t first, std::int64_t count,
              const LoraOptions& options);
  /// @param x  input of the layer
  ops::LowRankTerm term(const Tensor& x) const;

  const std::int64_t first;
  const double scale;
  Dropout dropout;
  Parameter a, b;
};

/// An adapter to add: to outputs [first, first + count) of the Linear of this path.
struct LoraPlace {
  std::string layer;  ///< "layers.0.attention.qkv"
  std::string name;   ///< of the adapter, unique within the layer: "lora_q_proj"
  std::int64_t first = 0, count = 0;
};

/// Freezes all weights of a model and adds adapters. Call it before the model is sharded or gets
/// memory. @throws InvalidArgument if a path is no Linear, or there is no place
void add_lora(Module& model, const std::vector<LoraPlace>& places, const LoraOptions& options);

}  // namespace tessera::nn
