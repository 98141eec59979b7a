#pragma once

#include <string>
#include <vector>

#include "io/checkpoint/reader.h"

namespace tessera::tools {

/// Sections that a checkpoint holds: "model", "optimizer", "trainer".
std::vector<std::string> section_names(const io::CheckpointIndex& index);
/// Bytes of all files of a checkpoint but its index.
std::int64_t stored_bytes(const io::CheckpointIndex& index);
/// Elements of the model.
std::int64_t parameter_count(const io::CheckpointIndex& index);

/// What `checkpoint inspect --json` prints: path, step, world_size, run_id, created, sections,
/// digest, parameters, bytes, files, model (configuration), tensors.
io::Json describe_checkpoint(const io::CheckpointReader& reader);

}  // namespace tessera::tools
