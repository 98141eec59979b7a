#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/consolidate/consolidate.h"
#include "io/consolidate/source.h"

namespace tessera::io {

/// A small file beside those of tensors.
struct SideFile {
  std::string name, content;
};

/// Configuration and tokenizer of an export; io/FORMAT.md lists them. Reads small files of the
/// source, and writes nothing.
/// @param warnings  sentences about files that are needed and not copied are added
/// @throws InvalidArgument, IoError, CorruptCheckpoint
std::vector<SideFile> compose_side_files(const ConsolidateSource& source,
                                         const ConsolidateOptions& options,
                                         std::vector<std::string>& warnings);

/// Whether an export may hold a file of this name that says which model it is.
inline constexpr const char* kConfigFile = "config.json";
bool is_config_file(std::string_view name);
/// Whether an export may hold a file of this name beside its tensors.
bool is_side_file(std::string_view name);

}  // namespace tessera::io
