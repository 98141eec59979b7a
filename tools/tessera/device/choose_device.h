#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/base/context.h"

namespace tessera::tools {

/// Where to compute.
struct ChosenDevice {
  std::shared_ptr<Context> context;
  std::string why_cpu{};  ///< why "auto" took the processor, in words; else empty
};

/// The N of "cuda:N"; none of "auto", "cpu" and "cuda". @throws InvalidArgument on another word
std::optional<int> parse_device(const std::string& wanted);

/// @param wanted  auto: a GPU if one can be used, else the processor; cpu; cuda: the GPU of this
///   rank; cuda:N: that one
/// @param local_rank  of this process on its host; ranks beyond the number of GPUs share them
/// @param threads     of the context
/// @throws InvalidArgument on another word, Unsupported naming what a GPU that was asked for lacks
ChosenDevice open_device(const std::string& wanted, int local_rank, int threads);

}  // namespace tessera::tools
