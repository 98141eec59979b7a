#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/base/context.h"

namespace tessera {

struct ChosenDevice {
  std::shared_ptr<Context> context;
  std::string why_cpu{};  ///< why "auto" chose the CPU; else empty
};

/// The N of "cuda:N"; empty for "auto", "cpu" and "cuda". @throws InvalidArgument on another word
std::optional<int> parse_device(const std::string& wanted);

/// @param wanted  auto (a GPU if usable, else the CPU), cpu, cuda (the GPU of the local rank), or
///   cuda:N
/// @param local_rank   taken modulo the number of GPUs
/// @param local_ranks  processes of this host that train together; on the CPU, each binds itself to
///   its NUMA nodes
/// @throws InvalidArgument on another word; Unsupported if the GPU cannot be used, with the reason
ChosenDevice open_device(const std::string& wanted, int local_rank, int threads,
                         int local_ranks = 1);

}  // namespace tessera
