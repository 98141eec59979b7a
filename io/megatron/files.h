#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/base/file.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory is a run of Megatron-core, which has latest_checkpointed_iteration.txt, or a
/// checkpoint of NeMo, which has its tensors in weights/.
bool is_megatron_run(const fs::path& dir);

/// The directory of a run's checkpoint, with `.metadata`: of the newest, or of an iteration.
/// @throws InvalidArgument if there is no such iteration; CorruptCheckpoint if
///         latest_checkpointed_iteration.txt names none; Unsupported on the formats `torch` and `zarr`
fs::path find_megatron(const fs::path& run, std::optional<std::int64_t> iteration = {});

/// Opens the checkpoint that find_megatron finds. Its config.json may be in the run's directory.
/// @throws as find_megatron and open_dcp
std::unique_ptr<ShardedSource> open_megatron(const fs::path& run,
                                             std::optional<std::int64_t> iteration = {});

}  // namespace tessera::io
