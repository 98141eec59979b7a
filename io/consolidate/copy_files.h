#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "io/consolidate/attempt.h"
#include "io/consolidate/tensor_files.h"
#include "io/pump/write_files.h"

namespace tessera::io {

/// Checksum of everything that determines the output of copy_files: layout of the files, sources of
/// their bytes, and the sources' checksums or, without those, sizes and times of files.
/// @throws IoError, errors of the sources
std::uint64_t copy_identity(const std::vector<ExportFile>& files);

/// Writes all files into the attempt's directory; see write_files. Verifies files that the attempt
/// has recorded instead, and rewrites damaged ones.
/// @param options  memory, jobs, direct_io
/// @param wrote    called with the bytes of a block, and whether an earlier attempt wrote it; calls
///                 are serialized. False: stop
/// @return false if stopped; finished files are recorded
bool copy_files(Attempt& attempt, const std::vector<ExportFile>& files, const WriteOptions& options,
                const std::function<bool(std::int64_t bytes, bool reused)>& wrote);

}  // namespace tessera::io
