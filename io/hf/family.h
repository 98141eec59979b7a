#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "io/hf/model_source.h"
#include "io/source/names.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// Conversions of a family of models between Hugging Face's layout and tessera's.
struct HfFamily {
  std::string_view name;  ///< "model_type" of a config.json, and "arch" of a "model" section
  /// "model" section of a config.json. @throws CorruptCheckpoint, Unsupported
  Json (*config_from_hf)(const Json& config, const std::string& source);
  /// config.json for weights of `dtype`. @throws InvalidArgument
  Json (*config_to_hf)(const Json& model, DType dtype);
  std::string (*name_to_hf)(const std::string& name);
  /// Empty for a buffer.
  std::string (*name_from_hf)(const std::string& name);
  /// The weights under tessera's names; title() is the source's name. @throws InvalidArgument,
  ///   Unsupported if they don't match the "model" section
  std::unique_ptr<ModelSource> (*open)(std::unique_ptr<ShardedSource> source, Json model,
                                       const NameRules& rules, LoadPolicy policy);
};

/// Null for a family that tessera does not know.
const HfFamily* find_hf_family(std::string_view name);
/// By the "model_type" of a config.json.
const HfFamily* hf_family_of(const Json& config);

}  // namespace tessera::io
