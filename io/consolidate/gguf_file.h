#pragma once

#include <string_view>
#include <vector>

#include "io/consolidate/consolidate.h"
#include "io/consolidate/side_files.h"
#include "io/consolidate/source.h"
#include "io/consolidate/tensor_files.h"

namespace tessera::io {

inline constexpr std::string_view kGgufFile = "model.gguf";

/// Lays out model.gguf, and gives the weights of `source` their names, shapes and dtypes in it.
/// @param source  weights under Hugging Face's names; receives warnings
/// @param files   of a Hugging Face export: config.json and the tokenizer's
/// @throws Unsupported naming a family, setting or dtype without an equal in GGUF
ExportFile plan_gguf_file(ConsolidateSource& source, const std::vector<SideFile>& files,
                          const ConsolidateOptions& options);

/// Whether a GGUF file names tessera as its writer; false if it cannot be read.
bool is_gguf_of_export(const fs::path& file);

}  // namespace tessera::io
