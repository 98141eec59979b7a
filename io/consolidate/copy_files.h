#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "io/consolidate/attempt.h"
#include "io/consolidate/consolidate.h"
#include "io/consolidate/tensor_files.h"

namespace tessera::io {

struct CopyOptions {
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes of all buffers together
  int jobs = 1;                                   ///< threads
  bool direct_io = true;        ///< past the page cache where the file system can do that
  CopyBy by = CopyBy::Program;  ///< Auto: the system, until it has copied through this machine
  /// Blocks are synced and recorded when so many bytes are written: what a kill may cost.
  std::int64_t bytes_per_record = std::int64_t{256} << 20;
};

/// What the threads share the work and the memory by.
struct CopyGrain {
  std::int64_t block = 0;  ///< bytes of an output file that are made at once
  int jobs = 1;
};
/// Blocks of at most 4 MiB, smaller if `memory` gives each thread less, and fewer threads if it
/// gives them less than 64 KiB.
CopyGrain copy_grain(const CopyOptions& options);

/// Checksum of all that decides what copy_files writes: the files' layout, where each of their
/// bytes comes from, and its checksum there; where the source has none, size and time of its files;
/// where it has no ranges of bytes, something new at each call.
/// @throws IoError, and what the sources throw
std::uint64_t copy_identity(const std::vector<ExportFile>& files, std::int64_t block);

/// What became of copy_files.
struct CopyResult {
  bool complete = false;           ///< all was written, not stopped
  std::int64_t system_copied = 0;  ///< bytes that the system copied
};

/// Writes all files into the attempt's directory and syncs them. Each block is gathered from the
/// ranges of bytes that make it up, which are checksummed as they are read, converted, and written;
/// or, if the source has checksums, copied by the system, and checksummed as they are read from the
/// copy. A chunk whose checksum turns out wrong ends it all. Blocks that the attempt has recorded
/// are read back instead, and made anew if they are not as recorded.
/// @param wrote  called from one thread at a time, with the bytes of a block that is done and
///               whether it was there already. False: stop; what is done is synced and recorded.
/// @throws IoError, CorruptCheckpoint naming file, tensor and elements, and what the sources throw
CopyResult copy_files(Attempt& attempt, const std::vector<ExportFile>& files,
                      const CopyOptions& options,
                      const std::function<bool(std::int64_t bytes, bool reused)>& wrote);

}  // namespace tessera::io
