#pragma once

#include "io/checkpoint/save.h"

namespace tessera::io {

/// Reads a saved checkpoint back; each rank reads its share of the shards.
/// Sizes, headers, checksums and finiteness are verified as verify_checkpoint does; trainer.json is
/// not looked at. Takes 1 MiB beside the index. What the page cache still holds comes from there,
/// so this finds what went wrong on the way to the file system, not what a disk lost after that.
/// @param dir      the checkpoint, committed or about to be
/// @param request  of the save; its pulse counts on as this gets on
/// @param hurry    set: a second later this gives up; may be null
/// @throws CorruptCheckpoint naming file, tensor and range of the first damage; IoError if there is
///         none, but not all could be read
void read_back(const fs::path& dir, const SaveRequest& request,
               const std::atomic<bool>* hurry = nullptr);

}  // namespace tessera::io
