#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/consolidate/consolidate.h"
#include "io/consolidate/source.h"

namespace tessera::io {

/// A small file of an export, without tensors.
struct SideFile {
  std::string name, content;
};

/// Configuration and tokenizer of an export; io/FORMAT.md lists the files. Writes nothing.
/// @param warnings  receives a sentence about files that are needed but not copied
/// @throws InvalidArgument, IoError, CorruptCheckpoint
std::vector<SideFile> compose_side_files(const ConsolidateSource& source,
                                         const ConsolidateOptions& options,
                                         std::vector<std::string>& warnings);

inline constexpr const char* kConfigFile = "config.json";
/// Whether a file of this name is the configuration of an export.
bool is_config_file(std::string_view name);
/// Whether a file of this name may be a side file of an export.
bool is_side_file(std::string_view name);

}  // namespace tessera::io
