#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "io/base/file.h"
#include "io/hf/lora.h"
#include "io/source/names.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a checkpoint has weights of a running model of PEFT with LoRA, such as
/// `base_model.model.X.lora_A.default.weight`, and the rules do not exclude them.
bool has_peft_names(const ShardedSource& source, const NameRules& rules = {});

/// The LoRA adapters of such a checkpoint, under the names of PEFT's files.
/// @param config_file  adapter_config.json; empty: the one beside the checkpoint
/// @throws InvalidArgument if the configuration is missing or another, there are no or several
///         adapters, or the halves of one do not fit together; Unsupported on a weight of a dtype
///         that tessera lacks, or trained weights that are not of the adapters
PeftTensors peft_of_state(std::shared_ptr<const ShardedSource> source, const NameRules& rules,
                          const std::optional<fs::path>& config_file);

/// name_all() of the adapters' source, with the names that the base's weights have without adapters,
/// whose role is then Other, as is that of other models (EMA) if the adapters' own has a base.
/// Empty if the source lacks the weights of the layers that have adapters.
std::vector<TensorName> names_of_base(const PeftTensors& adapters);

}  // namespace tessera::io
