#pragma once

#include <string>

#include "tools/tessera/plot/figure.h"

namespace tessera::tools {

/// A drawing as a PNG file of twice its size, by librsvg, which is loaded here: the program starts where it is
/// missing.
/// @throws Unsupported if it is missing
std::string to_png(const Drawing& drawing);

}  // namespace tessera::tools
