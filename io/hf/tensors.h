#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/base/json.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// A weight of tessera, and the Hugging Face tensors of which it is the concatenation along dim 0.
struct HfTensor {
  struct Part {
    std::string name;
    std::int64_t rows = 0;  ///< extent of dim 0
  };
  TensorInfo info;
  std::vector<Part> parts;
  bool is_linear = false;  ///< the weight of a layer of a block that LoRA can adapt: no expert
  bool in_out = false;     ///< which is [in, out], else [out, in]

  /// Shape of a part.
  Shape shape_of(const Part& part) const {
    Shape shape = info.shape;
    shape[0] = part.rows;
    return shape;
  }
};

/// Weights of GPT-2 with this "model" section: each is one tensor of the same name at Hugging Face,
/// after "transformer.". Linear weights have the Conv1D layout [in, out]; the head is wte.weight.
/// @throws InvalidArgument if a field is missing or out of range
std::vector<HfTensor> gpt2_tensors(const Json& model);

/// Weights of any other family: rows of queries, keys and values are one tensor, as are gate and up.
/// @throws InvalidArgument if a field is missing or out of range
std::vector<HfTensor> decoder_tensors(const Json& model);

}  // namespace tessera::io
