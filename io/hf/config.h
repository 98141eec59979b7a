#pragma once

#include <set>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "io/base/json.h"

namespace tessera::io {

// What Hugging Face's config.json says of any model, whether tessera knows its architecture or not.

/// Parses a config.json. What Python may have written there and nlohmann::json does not keep, NaN,
/// Infinity and -Infinity and integers of more than 18 digits, becomes strings that
/// dump_hf_config() writes as it was.
/// @param source  named in errors
/// @throws CorruptCheckpoint as parse_json
Json parse_hf_config(std::string_view text, const std::string& source);

/// Text of what parse_hf_config() made, indented by 2.
std::string dump_hf_config(const Json& config);

/// PyTorch's name of a floating-point dtype: "float32", "bfloat16", ...
std::string_view torch_dtype_name(DType dtype);

/// Whether "architectures" names a model without head, such as LlamaModel: its weights are those
/// that lie under `model.` in LlamaForCausalLM.
bool is_headless(const Json& config);

/// Makes "dtype" and "torch_dtype" say in which dtype the weights are, there and in "text_config",
/// where they stand; adds "torch_dtype" if neither stands in `config` itself.
/// @param config  an object
void set_torch_dtype(Json& config, DType dtype);

/// Names of the Python files that "auto_map" asks for from the model's directory. Those of another
/// repository of Hugging Face ("owner/name--module.Class") are none, nor are names of other
/// characters than A-Z, a-z, 0-9, `_`, `.`, `/` and `-`.
/// @param config  config.json, tokenizer_config.json, processor_config.json, ...; any JSON
std::set<std::string> auto_map_files(const Json& config);

}  // namespace tessera::io
