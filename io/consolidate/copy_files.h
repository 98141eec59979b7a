#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "io/consolidate/attempt.h"
#include "io/consolidate/tensor_files.h"
#include "io/pump/write_files.h"

namespace tessera::io {

/// Checksum of all that decides what copy_files writes: the files' layout, the source of each of
/// their bytes, and its checksum; for a source without checksums, size and time of its files.
/// @throws IoError, and what the sources throw
std::uint64_t copy_identity(const std::vector<ExportFile>& files);

/// Writes all files into the attempt's directory; see write_files. A file that the attempt has
/// recorded is read back instead, and written anew if it is not as recorded.
/// @param options  memory, jobs, direct_io
/// @param wrote    called from one thread at a time with the bytes of a block, and whether an
///                 earlier attempt had written it. False: stop
/// @return false if it was stopped; files that were finished are recorded
bool copy_files(Attempt& attempt, const std::vector<ExportFile>& files, const WriteOptions& options,
                const std::function<bool(std::int64_t bytes, bool reused)>& wrote);

}  // namespace tessera::io
