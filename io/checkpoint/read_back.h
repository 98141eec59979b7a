#pragma once

#include "io/checkpoint/save.h"

namespace tessera::io {

/// Verifies this rank's share of the shards of a saved checkpoint, as verify_checkpoint does, but
/// not trainer.json. Takes 1 MiB of memory besides the index. Reads through the page cache, so it
/// finds errors made before the data reached the file system, but not those of the disk.
/// @param dir      the checkpoint, possibly before its commit
/// @param request  request of the save; increments its pulse on progress
/// @param hurry    set by the caller to make read_back give up within about a second; may be null
/// @throws CorruptCheckpoint naming file, tensor and range of the first damage; IoError if there is
///         no damage, but a part could not be read
void read_back(const fs::path& dir, const SaveRequest& request,
               const std::atomic<bool>* hurry = nullptr);

}  // namespace tessera::io
