#pragma once

#include <string>
#include <vector>

#include "io/base/file.h"
#include "io/base/json.h"
#include "io/source/hyperparameters.h"

namespace tessera::io {

/// Compares the arguments of Megatron-LM in `common.pt`, if a checkpoint has them, with a model:
/// numbers of heads, and switches that change the results of the same weights.
/// @param config  a config.json or tessera's "model" section
/// @return sentences about what can't be compared
/// @throws InvalidArgument naming the argument that differs; Unsupported on a switch that Hugging
///         Face's models lack
std::vector<std::string> check_megatron_arguments(const fs::path& dir, const Json& config);

/// The optimizer's hyperparameters in `common.pt`, which does not name weights: of weights of two or
/// more dims and of others, as Megatron groups them unless told otherwise. None if the groups are
/// others than these two.
Hyperparameters read_megatron_hyperparameters(const fs::path& dir);

}  // namespace tessera::io
