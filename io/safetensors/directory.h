#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory is a Hugging Face model: has model.safetensors or its index.json.
bool is_safetensors_directory(const fs::path& dir);

/// Opens such a directory. Reads the header of every file. The format has no checksums.
/// @throws CorruptCheckpoint naming the file, also if a tensor is not in the file that the index
///         names; IoError
std::unique_ptr<ShardedSource> open_safetensors_directory(const fs::path& dir);

/// Content of an index such as model.safetensors.index.json.
struct WeightMap {
  std::map<std::string, std::string> file_of;  ///< by name of the tensor
  std::vector<std::string> files;              ///< sorted
};
/// @throws CorruptCheckpoint naming the file, IoError
WeightMap read_weight_map(const fs::path& index);

/// Opens one safetensors file of a directory. @param kind  see ShardedSource
std::unique_ptr<ShardedSource> open_safetensors_file(const fs::path& dir, const std::string& name,
                                                     const std::string& kind);

}  // namespace tessera::io
