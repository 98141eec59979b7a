#pragma once

#include <cstdint>
#include <memory>

#include "io/consolidate/consolidate.h"
#include "io/consolidate/source.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

inline constexpr std::int64_t kMaxConfig = std::int64_t{64} << 20;  ///< bytes of a config.json

/// Adds the tensors of another program's checkpoint that the options select.
/// @param result  with `path`
/// @throws as open_consolidate_source
void add_sharded(ConsolidateSource& result, std::unique_ptr<ShardedSource> source,
                 const ConsolidateOptions& options);

/// Throws if --dtype might convert scales of quantized weights.
void check_scales(const ConsolidateSource& source);

/// The warning for a model whose tensors cannot be checked. @param why  clause without full stop
std::string unchecked_warning(const std::string& why);

/// Parses a config.json into hf_config and hf_config_file.
/// @return its model_type; empty if there is none, with neither of them set
std::string read_config(ConsolidateSource& result, const fs::path& file);
/// The error if that is missing.
CorruptCheckpoint no_model_type(const fs::path& file);

}  // namespace tessera::io
