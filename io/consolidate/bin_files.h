#pragma once

#include <string_view>

#include "io/consolidate/sink.h"

namespace tessera::io {

inline constexpr std::string_view kBinModel = "pytorch_model", kBinOptimizer = "optimizer.bin";

/// Lays out files of torch.save: pytorch_model.bin, or several with an index, of the weights; and
/// optimizer.bin, the state_dict() of a torch.optim.AdamW with the model's parameters in one group.
/// @throws Unsupported on a dtype that PyTorch lacks, or if the order of the parameters is unknown
void plan_bin_files(ConsolidateSource& source, const ConsolidateOptions& options,
                    ExportLayout& layout);

}  // namespace tessera::io
