#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/base/byte_range.h"

namespace tessera::io {

/// A file inside a zip archive, not compressed.
struct ZipEntry {
  std::string name;
  std::int64_t size = 0;
  std::uint32_t crc32 = 0;
  std::int64_t header = 0;  ///< of its local header, counted in the archive
  std::int64_t limit = 0;   ///< where the next entry or the directory begins
};

/// The directory of a zip or zip64 archive with stored (uncompressed) entries only, as torch.save
/// writes it. Reads only the directory. Names are not used as paths.
class ZipDirectory {
 public:
  /// @param archive  exactly the archive: it starts and ends with this range, without a comment
  /// @throws CorruptCheckpoint on anything that contradicts itself: no end record, sizes that pass
  ///         the archive's end, entries that overlap, a name that stands twice; and if the archive
  ///         is said to span several files; Unsupported naming the entry if one is compressed or
  ///         encrypted
  explicit ZipDirectory(const ByteRange& archive);

  const std::vector<ZipEntry>& entries() const { return entries_; }
  /// Null if there is none of this name.
  const ZipEntry* find(const std::string& name) const;

 private:
  std::vector<ZipEntry> entries_;  // by position
};

/// First byte of an entry's data, counted in the archive. Reads its local header.
/// @throws CorruptCheckpoint if that is not the directory's entry, or the data passes `limit`
std::int64_t zip_data_begin(const ByteRange& archive, const ZipEntry& entry);

/// An entry's content, verified against its checksum (0 is none: PyTorch can leave it out).
/// @throws CorruptCheckpoint on a wrong checksum or if it is longer than max_bytes
std::string read_zip_entry(const ByteRange& archive, const ZipEntry& entry, std::int64_t max_bytes);

}  // namespace tessera::io
