#pragma once

#include <set>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "io/base/json.h"

namespace tessera::io {

// Hugging Face config.json of any model, known to tessera or not.

/// Parses a config.json. Python's values that nlohmann::json does not preserve (NaN, Infinity,
/// -Infinity, integers of more than 18 digits) become strings that dump_hf_config() restores.
/// @param source  named in errors
/// @throws CorruptCheckpoint as parse_json
Json parse_hf_config(std::string_view text, const std::string& source);

/// Inverse of parse_hf_config(); indented by 2.
std::string dump_hf_config(const Json& config);

/// PyTorch's name of a floating-point dtype: "float32", "bfloat16", ...
std::string_view torch_dtype_name(DType dtype);

/// Whether "architectures" names a model without head, such as LlamaModel. The names of its weights
/// are those of LlamaForCausalLM without `model.`.
bool is_headless(const Json& config);

/// Updates "dtype" and "torch_dtype" where present in `config` and its "text_config"; adds
/// "torch_dtype" if `config` has neither.
/// @param config  an object
void set_torch_dtype(Json& config, DType dtype);

/// Names of the Python files that "auto_map" loads from the model's directory. Excludes files of
/// other repositories ("owner/name--module.Class") and names with other characters than A-Z, a-z,
/// 0-9, `_`, `.`, `/` and `-`.
/// @param config  content of config.json, tokenizer_config.json or the like; may be any JSON
std::set<std::string> auto_map_files(const Json& config);

}  // namespace tessera::io
