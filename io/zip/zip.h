#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/base/byte_range.h"

namespace tessera::io {

/// An uncompressed file inside a zip archive.
struct ZipEntry {
  std::string name;
  std::int64_t size = 0;
  std::uint32_t crc32 = 0;
  std::int64_t header = 0;  ///< offset of its local header in the archive
  std::int64_t limit = 0;   ///< offset of the next entry or the directory
};

/// Directory of a zip or zip64 archive of uncompressed entries, as torch.save writes it. Names of
/// entries are never used as paths.
class ZipDirectory {
 public:
  /// @param archive  the archive alone; it must not end with a zip comment
  /// @throws CorruptCheckpoint on an inconsistent archive: no end record, sizes beyond its end,
  ///         overlapping entries, duplicate names, several files; Unsupported naming a compressed
  ///         or encrypted entry
  explicit ZipDirectory(const ByteRange& archive);

  const std::vector<ZipEntry>& entries() const { return entries_; }
  /// Null if absent.
  const ZipEntry* find(const std::string& name) const;

 private:
  std::vector<ZipEntry> entries_;  // by offset
};

/// Offset of an entry's data in the archive. Reads its local header.
/// @throws CorruptCheckpoint if the header contradicts the directory, or the data exceeds `limit`
std::int64_t zip_data_begin(const ByteRange& archive, const ZipEntry& entry);

/// Content of an entry, verified against its CRC-32 unless that is 0, because PyTorch may omit it.
/// @throws CorruptCheckpoint on a wrong checksum or if it is longer than max_bytes
std::string read_zip_entry(const ByteRange& archive, const ZipEntry& entry, std::int64_t max_bytes);

}  // namespace tessera::io
