#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/consolidate/consolidate.h"
#include "io/consolidate/source.h"

namespace tessera::io {

/// A configuration or tokenizer file of an export.
struct SideFile {
  std::string name, content;
};

/// Contents of all SideFiles of an export; io/FORMAT.md lists them. Writes nothing.
/// @param warnings  receives a sentence on files that the model needs but that are not copied
/// @throws InvalidArgument, IoError, CorruptCheckpoint
std::vector<SideFile> compose_side_files(const ConsolidateSource& source,
                                         const ConsolidateOptions& options,
                                         std::vector<std::string>& warnings);

inline constexpr const char* kConfigFile = "config.json";
inline constexpr const char* kGenerationFile = "generation_config.json";
/// Whether a file of this name is the configuration of an export.
bool is_config_file(std::string_view name);
/// Whether an export may contain a configuration or tokenizer file of this name.
bool is_side_file(std::string_view name);

}  // namespace tessera::io
