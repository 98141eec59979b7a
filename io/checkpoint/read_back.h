#pragma once

#include "io/checkpoint/save.h"

namespace tessera::io {

/// Verifies this rank's share of the shards of a saved checkpoint, as verify_checkpoint does,
/// without trainer.json. Takes 1 MiB besides the index. Reads through the page cache: finds errors
/// on the way to the file system, not later losses of the disk.
/// @param dir      the checkpoint, committed or about to be
/// @param request  of the save; its pulse is incremented with progress
/// @param hurry    gives up one second after this is set; may be null
/// @throws CorruptCheckpoint naming file, tensor and range of the first damage; else IoError if a
///         part could not be read
void read_back(const fs::path& dir, const SaveRequest& request,
               const std::atomic<bool>* hurry = nullptr);

}  // namespace tessera::io
