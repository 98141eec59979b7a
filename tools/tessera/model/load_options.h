#pragma once

#include <string>

#include "tools/tessera/command.h"
#include "tools/tessera/model/loaded_model.h"

namespace tessera::tools {

/// Declares MODEL and how to load it. `model` and `options` must outlive the parsing.
void add_load_options(CLI::App& app, std::string& model, LoadOptions& options);

}  // namespace tessera::tools
