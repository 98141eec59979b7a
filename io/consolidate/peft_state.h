#pragma once

#include "io/consolidate/consolidate.h"
#include "io/consolidate/source.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a checkpoint has weights of a running model of PEFT with LoRA, such as
/// `base_model.model.X.lora_A.default.weight`, and the options do not exclude them.
bool has_peft_names(const ShardedSource& source, const ConsolidateOptions& options);

/// Adds the LoRA adapters of such a checkpoint under the names of PEFT's files, and their
/// adapter_config.json: of --config, or beside the checkpoint.
/// @param result  with `path`
/// @throws InvalidArgument if the configuration is missing or another, there are several adapters,
///         or the halves of one do not fit together
void add_peft_adapters(ConsolidateSource& result, const ShardedSource& source,
                       const ConsolidateOptions& options);

}  // namespace tessera::io
