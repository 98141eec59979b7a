#pragma once

#include <string>
#include <vector>

#include "train/metrics.h"

namespace tessera::tools {

/// Self-contained SVG of training and validation loss over steps, for light and dark pages. Long
/// curves are thinned; non-finite points are left out.
std::string loss_svg(const std::string& title, const std::vector<train::LossPoint>& train,
                     const std::vector<train::LossPoint>& val);

}  // namespace tessera::tools
