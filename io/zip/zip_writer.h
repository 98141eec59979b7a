#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/pump/layout.h"

namespace tessera::io {

/// Place of an entry's data that is written later.
struct ZipData {
  std::int64_t begin = 0;  ///< offset in the file
  /// Offsets in the file of its CRC-32: behind the data and in the directory.
  std::array<std::int64_t, 2> crc32_at{};
};

/// Lays out an archive of uncompressed entries as torch.save writes it: data at multiples of 64
/// bytes, each followed by its checksum and sizes; zip64 where a size or offset needs it.
class ZipWriter {
 public:
  static constexpr std::int64_t kAlignment = 64;  ///< of data, and of the archive in its file

  /// @param begin  offset of the archive in its file, a multiple of kAlignment
  explicit ZipWriter(std::int64_t begin) : begin_(begin), end_(begin) {}

  /// Adds an entry. @param name  at most 65,535 bytes, distinct
  void add(const std::string& name, std::string_view content);
  /// Adds an entry of `bytes` bytes whose data is written later.
  void reserve(const std::string& name, std::int64_t bytes);
  /// Ends the archive.
  void finish();

  /// Offset in the file behind what was added.
  std::int64_t end() const { return end_; }
  /// Places of the reserved entries, in order; complete after finish().
  const std::vector<ZipData>& data() const { return data_; }
  /// Headers and contents, in file order; the other bytes between them and data are zeros.
  std::vector<Literal> take_literals() { return std::move(literals_); }

 private:
  struct Entry {
    std::string name;
    std::int64_t size, header;  // header: offset in the archive
    std::uint32_t crc32;
    bool is_reserved;
  };
  void begin_entry(const std::string& name, std::int64_t size, std::string_view content);
  void put(std::string bytes);

  std::int64_t begin_;
  std::int64_t end_;
  std::vector<Entry> entries_;
  std::vector<ZipData> data_;
  std::vector<Literal> literals_;
};

}  // namespace tessera::io
