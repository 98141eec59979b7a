#pragma once

#include <string_view>

#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Sets fields from a JSON text: {"section": {"key": value}}, comments allowed.
/// @param name  file name, for messages
/// @throws InvalidArgument with file and line on malformed JSON, an unknown or repeated key, a
///   wrong type, or a value out of range; config is then partly set
void read_json_config(Config& config, std::string_view text, std::string_view name);

}  // namespace tessera::tools
