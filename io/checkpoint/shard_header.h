#pragma once

#include <string>

#include "io/checkpoint/index.h"
#include "io/safetensors/header.h"

namespace tessera::io {

/// Reads the header of a checkpoint's shard and checks that it is the one that was saved.
/// @param name  of the shard in the index
/// @throws CorruptCheckpoint if it is no header, tells of another step, run or world size than the
///         index, or if its checksum in the index (where there is one) is another; IoError
SafetensorsHeader read_shard_header(const File& file, const std::string& name,
                                    const CheckpointIndex& index);

}  // namespace tessera::io
