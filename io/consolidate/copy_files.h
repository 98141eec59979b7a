#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "io/consolidate/attempt.h"
#include "io/consolidate/tensor_files.h"
#include "io/pump/write_files.h"

namespace tessera::io {

/// Checksum of everything that determines the output of copy_files: the layout of the files, the
/// locations of their bytes in the sources, and the checksums of these bytes. For sources without
/// checksums, size and time of the source files instead.
/// @param is_shared  equal on all machines that read the same files: device, inode and directory of
///                   source files are left out
/// @throws IoError, errors of the sources
std::uint64_t copy_identity(const std::vector<ExportFile>& files, bool is_shared = false);

/// Writes all files into the attempt's directory; see write_files. Verifies files that the attempt
/// has recorded, and writes only damaged ones of these.
/// @param options  memory, jobs, direct_io
/// @param wrote    called with the bytes written, and whether an earlier attempt wrote them; calls
///                 are serialized. Returning false stops copy_files
/// @return false if stopped; finished files are recorded
bool copy_files(Attempt& attempt, const std::vector<ExportFile>& files, const WriteOptions& options,
                const std::function<bool(std::int64_t bytes, bool reused)>& wrote);

}  // namespace tessera::io
