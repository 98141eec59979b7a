#pragma once

#include <string>

#include "core/base/dtype.h"
#include "io/base/json.h"

namespace tessera::io {

/// Tessera's "model" section (see models::to_json) from a config.json of one of decoder_families().
/// @param source  named in errors, usually the file
/// @throws CorruptCheckpoint on a missing or ill-typed field; Unsupported naming a setting that
///         tessera lacks
Json decoder_config_from_hf(const Json& config, const std::string& source);

/// config.json for a "model" section of one of decoder_families() with weights of `dtype`.
/// @throws InvalidArgument if a field is missing or the family is not one of them
Json decoder_config_to_hf(const Json& model, DType dtype);

}  // namespace tessera::io
