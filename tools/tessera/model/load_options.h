#pragma once

#include <string>

#include "tools/tessera/command.h"
#include "tools/tessera/model/loaded_model.h"

namespace tessera::tools {

/// Declares MODEL and the load options. `model` and `options` must outlive the parsing.
void add_load_options(CLI::App& app, std::string& model, LoadOptions& options);

}  // namespace tessera::tools
