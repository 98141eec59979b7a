#pragma once

#include <string_view>

#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Sets the fields that a JSON text names: {"section": {"key": value}}, comments allowed.
/// @param name  the file's, for messages, which all give file and line
/// @throws InvalidArgument on malformed JSON, an unknown key (with the nearest known one), a key
///   that stands twice, a wrong type, or a value out of range. config is then partly set
void read_json_config(Config& config, std::string_view text, std::string_view name);

}  // namespace tessera::tools
