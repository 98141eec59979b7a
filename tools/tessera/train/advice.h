#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// AdamW's usual learning rate for a model trained from random weights (Kaplan et al. 2020,
/// arXiv:2001.08361, equation D.1), at most 1e-3 and at least 3e-5.
double usual_lr(std::int64_t parameters);

/// Notes about settings that are allowed, and rarely meant.
/// @param processors   that the ranks of this machine share
/// @param ranks        of this machine, on its processors; 0: they compute on GPUs
std::vector<std::string> advice(const Config& config, std::int64_t parameters,
                                bool has_random_weights, int processors, int ranks);

}  // namespace tessera::tools
