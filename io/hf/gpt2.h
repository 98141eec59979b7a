#pragma once

#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "io/base/json.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Our "model" section, {"arch": "gpt2", "n_layer", "n_head", "n_embd", "vocab_size", "seq_len",
/// "layer_norm_eps", "dropout"}, from a Hugging Face config.json of GPT-2. `dropout` is
/// resid_pdrop.
/// @param source  named in errors, usually the file
/// @throws CorruptCheckpoint on a missing or ill-typed field; Unsupported naming the setting if the
///         model computes something that tessera's GPT-2 does not (another activation, an untied
///         head, an MLP that is not 4 * n_embd wide, another scaling of attention)
Json gpt2_config_from_hf(const Json& config, const std::string& source);

/// config.json of GPT2LMHeadModel for a "model" section of arch gpt2, stored as `dtype`.
/// @throws InvalidArgument if a field is missing or the arch is another
Json gpt2_config_to_hf(const Json& model, DType dtype);

/// Tensors that a GPT-2 of this "model" section has, by our names: those of Hugging Face without
/// "transformer.". Products keep the Conv1D layout [in, out]; the head is wte.weight.
/// @throws InvalidArgument if a field is missing or no positive number
std::vector<TensorInfo> gpt2_tensors(const Json& model);

/// Name in a Hugging Face file ("transformer.h.0.ln_1.weight") of one of ours.
std::string gpt2_name_to_hf(const std::string& name);
/// Our name of a tensor in a Hugging Face file, with or without its prefix; empty if it is a buffer
/// that holds no weight (attn.bias, attn.masked_bias).
std::string gpt2_name_from_hf(const std::string& name);

/// Compares what a model needs with what a file or checkpoint holds.
/// @throws InvalidArgument that lists all missing, unexpected and mismatched tensors at once
void match_tensors(const std::vector<TensorInfo>& expected, const std::vector<TensorInfo>& found,
                   const std::string& source);

}  // namespace tessera::io
