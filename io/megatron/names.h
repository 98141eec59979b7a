#pragma once

#include <string>

#include "io/base/json.h"
#include "io/hf/model_names.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether the tensors are those of a GPT model of Megatron-core, by their names.
bool is_megatron(const ShardedSource& source);

/// Gives a source with is_megatron() the names and shapes of a Hugging Face model: takes apart
/// stacked layers and experts, the rows of queries, keys and values, and gate and up; removes rows
/// that pad the vocabulary. Moments get names as in other programs' nested dicts,
/// optimizer.state.NAME.exp_avg, unless they are flattened. Tensors that belong to none of the model
/// keep their names; missing ones are left to match_model.
///
/// @param model   names and shapes in Hugging Face's files: GPT-2, Llama, Mistral, Qwen2, Qwen3,
///                Phi-3, Mixtral, Qwen3-MoE, or another model with the same names
/// @param config  has the numbers of heads: a config.json or tessera's "model" section
/// @throws InvalidArgument naming a tensor of Megatron's that is of another shape than the model
///         needs, or has more layers, experts or rows; Unsupported as ShardedSource::make
/// @return the name of a tensor of optimizer state that is flattened, if any
/// Source: sharded_state_dict() of megatron-core 0.9 to 0.16: transformer/mlp.py,
///         transformer/attention.py, transformer/transformer_block.py, transformer/moe/experts.py.
std::string use_hugging_face_names(ShardedSource& source, const ModelNames& model,
                                   const Json& config);

}  // namespace tessera::io
