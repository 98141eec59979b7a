#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/base/json.h"
#include "io/hf/tensors.h"

namespace tessera::io {

/// Conversions of a family of models between Hugging Face's layout and tessera's.
struct HfFamily {
  std::string_view name;        ///< "arch" of a "model" section
  std::string_view model_type;  ///< of a config.json
  std::string_view prefix;      ///< of most names; files may lack it
  /// "model" section of a config.json. @throws CorruptCheckpoint, Unsupported
  Json (*config_from_hf)(const Json& config, const std::string& source);
  /// config.json for weights of `dtype`. @throws InvalidArgument
  Json (*config_to_hf)(const Json& model, DType dtype);
  std::vector<HfTensor> (*tensors)(const Json& model);

  /// By its name: masks and frequencies, which are computed anew.
  static bool is_buffer(std::string_view name);
};

/// Tensors of a checkpoint with this "model" section: weights, or LoRA adapters alone. @throws Unsupported on an unknown arch; InvalidArgument
std::vector<TensorInfo> model_tensors(const Json& model);

/// Names in the order of named_parameters() of the family's class in transformers 4 and 5.
/// @param names  of Hugging Face tensors, in the order of HfFamily::tensors
/// @return empty if they include experts, which transformers 5 stacks
std::vector<std::string> parameter_order(const std::vector<std::string>& names);
/// parameter_order() of all tensors of a model. @param model  tessera's "model" section
std::vector<std::string> parameters_of(const HfFamily& family, const Json& model);

/// All families that tessera knows.
const std::vector<HfFamily>& hf_families();
/// Null for a family that tessera does not know.
const HfFamily* find_hf_family(std::string_view name);
/// By the "model_type" of a config.json.
const HfFamily* hf_family_of(const Json& config);

}  // namespace tessera::io
