#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/shape.h"
#include "io/base/json.h"
#include "io/gguf/writer.h"

namespace tessera::io {

/// A family that has a GGUF architecture, and where its tensors differ from Hugging Face's.
struct GgufFamily {
  std::string_view model_type;  ///< of config.json
  std::string_view arch;        ///< general.architecture
  bool swaps_heads = false;     ///< rotary pairs of queries and keys are neighbours
  float norm_offset = 0;        ///< added to weights of norms
  bool post_norm = false;       ///< norms after attention and MLP
  bool any_head_dim = false;    ///< heads * head_dim may differ from the width
  std::int64_t full_every = 0;  ///< layers without window, unless a key lists them; 0: no windows
};

/// @throws Unsupported naming model_type and the families that there are
const GgufFamily& gguf_family(std::string_view model_type);
/// By general.architecture; null if there is none. Llama stands for Mistral too.
const GgufFamily* find_gguf_arch(std::string_view arch);

/// A Hugging Face tensor as GGUF stores it.
struct GgufTensor {
  std::string name;
  Shape shape;
  std::optional<Swap> swap{};  ///< of the Hugging Face tensor
  float offset = 0;            ///< added to its values
  bool is_f32 = false;         ///< in files of any dtype: vectors, norms and learned positions
};
/// @param config  config.json as HfFamily::config_to_hf writes it
/// @param name    with the family's prefix, such as `model.`
GgufTensor gguf_tensor(const GgufFamily& family, const Json& config, const std::string& name,
                       const Shape& shape);

/// Rotary factors, which GGUF stores as a tensor.
struct GgufFactors {
  std::string name;
  std::vector<float> values;
};

/// Settings of a model: keys `ARCH.*` and rotary factors.
/// @param config    config.json as HfFamily::config_to_hf writes it
/// @param warnings  receives a sentence on what readers of GGUF ignore
/// @throws Unsupported naming a setting that readers of GGUF lack for this architecture
std::vector<GgufFactors> add_gguf_settings(GgufKeys& keys, const GgufFamily& family,
                                           const Json& config, std::vector<std::string>& warnings);

}  // namespace tessera::io
