#pragma once

#include <string>
#include <vector>

#include "io/base/json.h"
#include "io/checkpoint/reader.h"

namespace tessera::tools {

/// Subset of "model", "optimizer", "trainer".
std::vector<std::string> section_names(const io::CheckpointIndex& index);
/// Bytes of all files of a checkpoint except the index.
std::int64_t stored_bytes(const io::CheckpointIndex& index);
std::int64_t parameter_count(const io::CheckpointIndex& index);

/// Output of `checkpoint inspect --json`: path, step, world_size, run_id, created, tessera,
/// format_version, sections, digest, parameters, bytes, files, model (configuration), tensors
/// (model weights by name: section, dtype, shape, number of chunks, checksum), optimizer ({step,
/// number of tensors} or null), configuration (of the run, from the trainer section, or null) and
/// trainer_problem (error from reading that section, or null).
/// @param with_places  also list each tensor's chunks as "places" (file, bytes, elements, checksum,
///                     box), and the tensors of exp_avg and exp_avg_sq
io::Json describe_checkpoint(const io::CheckpointReader& reader, bool with_places = false);

}  // namespace tessera::tools
