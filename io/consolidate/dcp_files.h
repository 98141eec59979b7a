#pragma once

#include <string_view>

#include "io/consolidate/sink.h"

namespace tessera::io {

inline constexpr std::string_view kDcpMetadata = ".metadata";
/// Whether a name is `.metadata` or `__0_N.distcp`.
bool is_dcp_name(std::string_view name);

/// Lays out a PyTorch Distributed Checkpoint of {"model": get_model_state_dict(),
/// "optimizer": get_optimizer_state_dict()}, as one rank writes it. Hyperparameters are there both by
/// group and, as with flatten_optimizer_state_dict, by weight. A tensor of over max_shard_size bytes
/// is cut along dim 0, into chunks of at least a row and 64 KiB.
/// @throws Unsupported on a dtype that PyTorch lacks, or optimizer state of no weight
void plan_dcp_files(ConsolidateSource& source, const ConsolidateOptions& options,
                    ExportLayout& layout);

}  // namespace tessera::io
