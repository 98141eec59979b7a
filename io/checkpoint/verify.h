#pragma once

#include "io/checkpoint/reader.h"
#include "io/pump/verify.h"

namespace tessera::io {

/// Reads a whole checkpoint. Checks the sizes of files, the header of each shard against the index,
/// checksums, finiteness of floating-point values, and the trainer section. Continues after a
/// problem. The report does not depend on the number of threads.
VerifyReport verify_checkpoint(const fs::path& dir, const CheckpointIndex& index,
                               const VerifyOptions& options = {});
VerifyReport verify_checkpoint(const CheckpointReader& reader, const VerifyOptions& options = {});

}  // namespace tessera::io
