#pragma once

#include <string>
#include <vector>

#include "io/base/json.h"
#include "io/checkpoint/reader.h"

namespace tessera::tools {

/// Sections that a checkpoint holds: "model", "optimizer", "trainer".
std::vector<std::string> section_names(const io::CheckpointIndex& index);
/// Bytes of all files of a checkpoint but its index.
std::int64_t stored_bytes(const io::CheckpointIndex& index);
/// Elements of the model.
std::int64_t parameter_count(const io::CheckpointIndex& index);

/// What `checkpoint inspect --json` prints: path, step, world_size, run_id, created, tessera,
/// format_version, sections, digest, parameters, bytes, files, model (its configuration), tensors
/// (of the model, by name: section, dtype, shape, number of chunks, checksum), optimizer ({step,
/// tensors: their number} or null), configuration (of the whole run, from the trainer section, or
/// null) and trainer_problem (why that cannot be read, or null).
/// @param with_places  each tensor also has "places" of its chunks, as the index has them: file,
///                     bytes, elements, checksum, box; and optimizer lists exp_avg and exp_avg_sq
io::Json describe_checkpoint(const io::CheckpointReader& reader, bool with_places = false);

}  // namespace tessera::tools
