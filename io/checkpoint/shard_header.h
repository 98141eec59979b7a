#pragma once

#include <string>

#include "io/checkpoint/index.h"
#include "io/safetensors/header.h"

namespace tessera::io {

/// Reads the header of a shard and compares it with the index.
/// @param name  of the shard in the index
/// @throws CorruptCheckpoint if the header is malformed, or its step, run, world size or checksum
///         (if the index has one) differ from the index; IoError
SafetensorsHeader read_shard_header(const File& file, const std::string& name,
                                    const CheckpointIndex& index);

}  // namespace tessera::io
