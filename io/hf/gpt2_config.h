#pragma once

#include <string>

#include "core/base/dtype.h"
#include "io/base/json.h"

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

}  // namespace tessera::io
