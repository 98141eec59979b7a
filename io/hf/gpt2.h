#pragma once

#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "io/base/json.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Tessera's "model" section, {"arch": "gpt2", "n_layer", "n_head", "n_embd", "vocab_size",
/// "seq_len", "layer_norm_eps", "dropout"}, from a Hugging Face config.json of GPT-2. `dropout` is
/// resid_pdrop.
/// @param source  named in errors, usually the file
/// @throws CorruptCheckpoint on a missing or ill-typed field; Unsupported naming a setting that
///         tessera's GPT-2 lacks (another activation, an untied head, an MLP that is not 4 * n_embd
///         wide, another scaling of attention)
Json gpt2_config_from_hf(const Json& config, const std::string& source);

/// config.json of GPT2LMHeadModel for a "model" section of arch gpt2 with weights of `dtype`.
/// @throws InvalidArgument if a field is missing or the arch is not gpt2
Json gpt2_config_to_hf(const Json& model, DType dtype);

/// Tensors of a GPT-2 with this "model" section. Names are those of Hugging Face without
/// "transformer."; linear weights have the Conv1D layout [in, out]; the head is wte.weight.
/// @throws InvalidArgument if a field is missing or not a positive number
std::vector<TensorInfo> gpt2_tensors(const Json& model);

/// "h.0.ln_1.weight" to "transformer.h.0.ln_1.weight".
std::string gpt2_name_to_hf(const std::string& name);
/// "transformer.h.0.ln_1.weight" or "h.0.ln_1.weight" to "h.0.ln_1.weight"; empty for a buffer
/// (attn.bias, attn.masked_bias).
std::string gpt2_name_from_hf(const std::string& name);

/// Compares the tensors of a model with those of a file or checkpoint.
/// @throws InvalidArgument listing all missing, unexpected and mismatched tensors
void match_tensors(const std::vector<TensorInfo>& expected, const std::vector<TensorInfo>& found,
                   const std::string& source);

}  // namespace tessera::io
