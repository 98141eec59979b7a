// Source of the format: PKWARE's APPNOTE.TXT 6.3. Reads only the parts that torch.save uses.

#include "io/zip/zip.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <unordered_set>

#include "core/base/error.h"
#include "io/base/crc.h"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "zip is little-endian");

constexpr std::uint32_t kLocalHeader = 0x04034b50, kDirectoryHeader = 0x02014b50;
constexpr std::uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kEnd64Locator = 0x07064b50;
constexpr std::int64_t kLocalHeaderSize = 30, kDirectoryHeaderSize = 46;
constexpr std::int64_t kEndSize = 22, kEnd64Size = 56, kEnd64LocatorSize = 20;
constexpr std::int64_t kMaxDirectory = std::int64_t{64} << 20;

/// Sequential reader of little-endian fields.
class Fields {
 public:
  Fields(std::string_view text, const std::string& source) : text_(text), source_(&source) {}

  template <typename T>
  T take() {
    T value{};
    const std::string_view bytes = take_bytes(sizeof(T));
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  std::string_view take_bytes(std::size_t n) {
    require<CorruptCheckpoint>(n <= text_.size(), "{}: the zip directory is truncated", *source_);
    const std::string_view bytes = text_.substr(0, n);
    text_.remove_prefix(n);
    return bytes;
  }
  /// A 64-bit size or offset below 2^63.
  std::int64_t take_size() {
    const auto value = take<std::uint64_t>();
    require<CorruptCheckpoint>(value < std::uint64_t{1} << 63,
                               "{}: a size in the zip directory is {}", *source_, value);
    return static_cast<std::int64_t>(value);
  }
  void skip(std::size_t n) { take_bytes(n); }
  std::size_t left() const { return text_.size(); }

 private:
  std::string_view text_;
  const std::string* source_;
};

/// An end record: the location of the directory, and `at`, the offset of the record itself, where
/// the directory must end.
struct End {
  std::int64_t entries = 0, size = 0, begin = 0;
  std::int64_t at = 0;
};

// torch.save never splits an archive, so any disk number other than 0 means damage.
void require_one_file(std::uint32_t disk, std::uint32_t directory_disk, const std::string& source) {
  require<CorruptCheckpoint>(disk == 0 && directory_disk == 0,
                             "{}: the zip archive claims to span several files (numbers {} and "
                             "{}), which torch.save never writes: it is damaged",
                             source, disk, directory_disk);
}

/// The zip64 end record, which precedes the end record at `end`; empty if there is none. PyTorch
/// always writes one.
std::optional<End> read_end64(const ByteRange& archive, std::int64_t end) {
  const std::string& source = archive.name();
  const std::int64_t locator_begin = end - kEnd64LocatorSize;
  if (locator_begin < kEnd64Size) return std::nullopt;
  const std::string locator_text = archive.read(locator_begin, kEnd64LocatorSize);
  Fields locator(locator_text, source);
  if (locator.take<std::uint32_t>() != kEnd64Locator) return std::nullopt;
  const auto disk = locator.take<std::uint32_t>();
  End result;
  result.at = locator.take_size();
  require_one_file(disk, 0, source);
  require<CorruptCheckpoint>(result.at <= locator_begin - kEnd64Size,
                             "{}: the zip64 end record is at {}, past its locator at {}", source,
                             result.at, locator_begin);
  const std::string text = archive.read(result.at, kEnd64Size);
  Fields fields(text, source);
  require<CorruptCheckpoint>(fields.take<std::uint32_t>() == kEnd64,
                             "{}: no zip64 end record at {}", source, result.at);
  require<CorruptCheckpoint>(fields.take_size() == locator_begin - result.at - 12,
                             "{}: the zip64 end record does not reach its locator", source);
  fields.skip(4);  // versions
  const auto this_disk = fields.take<std::uint32_t>();
  require_one_file(this_disk, fields.take<std::uint32_t>(), source);
  fields.skip(8);  // entries in this file
  result.entries = fields.take_size();
  result.size = fields.take_size();
  result.begin = fields.take_size();
  return result;
}

End read_end(const ByteRange& archive) {
  const std::string& source = archive.name();
  require<CorruptCheckpoint>(archive.size() >= kEndSize,
                             "{} has {} bytes; a zip archive has at least {}", source,
                             archive.size(), kEndSize);
  End result;
  result.at = archive.size() - kEndSize;
  const std::string text = archive.read(result.at, kEndSize);
  Fields fields(text, source);
  require<CorruptCheckpoint>(fields.take<std::uint32_t>() == kEnd,
                             "{} does not end like a zip archive: it was truncated, or is another "
                             "kind of file",
                             source);
  const auto disk = fields.take<std::uint16_t>();
  const auto directory_disk = fields.take<std::uint16_t>();
  fields.skip(2);
  result.entries = fields.take<std::uint16_t>();
  result.size = fields.take<std::uint32_t>();
  result.begin = fields.take<std::uint32_t>();
  require<CorruptCheckpoint>(fields.take<std::uint16_t>() == 0,
                             "{}: the zip archive's comment exceeds its end", source);
  require_one_file(disk, directory_disk, source);
  const End end = read_end64(archive, result.at).value_or(result);
  require<CorruptCheckpoint>(end.begin <= end.at && end.size == end.at - end.begin,
                             "{}: the zip directory has {} bytes at {}, but its end record begins "
                             "at {}",
                             source, end.size, end.begin, end.at);
  const auto agree = [](std::int64_t small, std::int64_t large, std::int64_t elsewhere) {
    return small == elsewhere || small == large;
  };
  require<CorruptCheckpoint>(
      agree(result.entries, end.entries, 0xffff) && agree(result.size, end.size, 0xffffffff) &&
          agree(result.begin, end.begin, 0xffffffff),
      "{}: the two end records of the zip archive contradict each other", source);
  return end;
}

// Reads those of the three values that exceed 32 bits from the zip64 extra field.
void apply_zip64(Fields extra, const std::string& where, std::int64_t& size,
                 std::int64_t& stored_size, std::int64_t& header) {
  constexpr std::int64_t kElsewhere = 0xffffffff;
  if (size != kElsewhere && stored_size != kElsewhere && header != kElsewhere) return;
  while (extra.left() >= 4) {
    const auto id = extra.take<std::uint16_t>();
    const auto bytes = extra.take<std::uint16_t>();
    Fields field(extra.take_bytes(bytes), where);
    if (id != 1) continue;
    for (std::int64_t* const value : {&size, &stored_size, &header}) {
      if (*value == kElsewhere) *value = field.take_size();
    }
    return;
  }
  throw CorruptCheckpoint("{}: the zip64 field is missing", where);
}

constexpr std::uint16_t kEncrypted = 1;  // bit of the flags

// Throws Unsupported if the local header confirms the flags and method, else CorruptCheckpoint.
[[noreturn]] void refuse_packed(const ByteRange& archive, const ZipEntry& entry,
                                std::uint16_t flags, std::uint16_t method,
                                const std::string& where) {
  const std::string text = archive.read(entry.header, kLocalHeaderSize);
  Fields local(text, where);
  local.skip(6);  // signature, version
  const auto local_flags = local.take<std::uint16_t>();
  const auto local_method = local.take<std::uint16_t>();
  require<CorruptCheckpoint>(
      ((flags ^ local_flags) & kEncrypted) == 0 && method == local_method,
      "{}: flags {:x} and method {} in the zip directory, but {:x} and {} before its data", where,
      flags, method, local_flags, local_method);
  require<Unsupported>((flags & kEncrypted) == 0, "{} is encrypted", where);
  throw Unsupported("{} is compressed (method {}); torch.save stores tensors uncompressed", where,
                    method);
}

ZipEntry take_entry(Fields& fields, const ByteRange& archive) {
  const std::string& source = archive.name();
  require<CorruptCheckpoint>(fields.take<std::uint32_t>() == kDirectoryHeader,
                             "{}: an entry of the zip directory has a wrong signature", source);
  fields.skip(4);  // versions
  const auto flags = fields.take<std::uint16_t>();
  const auto method = fields.take<std::uint16_t>();
  fields.skip(4);  // time
  ZipEntry entry;
  entry.crc32 = fields.take<std::uint32_t>();
  std::int64_t stored_size = fields.take<std::uint32_t>();
  entry.size = fields.take<std::uint32_t>();
  const auto name_size = fields.take<std::uint16_t>();
  const auto extra_size = fields.take<std::uint16_t>();
  const auto comment_size = fields.take<std::uint16_t>();
  const auto disk = fields.take<std::uint16_t>();
  fields.skip(6);  // attributes
  entry.header = fields.take<std::uint32_t>();
  entry.name = fields.take_bytes(name_size);
  const std::string where = fmt::format("{}: zip entry {}", source, entry.name);
  const std::string_view extra = fields.take_bytes(extra_size);
  fields.skip(comment_size);
  require_one_file(disk == 0xffff ? 0 : disk, 0, source);
  apply_zip64(Fields(extra, where), where, entry.size, stored_size, entry.header);
  if ((flags & kEncrypted) != 0 || method != 0) {
    refuse_packed(archive, entry, flags, method, where);
  }
  require<CorruptCheckpoint>(entry.size == stored_size,
                             "{} is not compressed, but takes {} bytes for {}", where, stored_size,
                             entry.size);
  return entry;
}

}  // namespace

ZipDirectory::ZipDirectory(const ByteRange& archive) {
  const std::string& source = archive.name();
  const End end = read_end(archive);
  require<CorruptCheckpoint>(end.size <= kMaxDirectory,
                             "{}: the zip directory has {} bytes; at most {} are accepted", source,
                             end.size, kMaxDirectory);
  require<CorruptCheckpoint>(end.entries <= end.size / kDirectoryHeaderSize,
                             "{}: {} entries in a zip directory of {} bytes", source, end.entries,
                             end.size);
  const std::string text = archive.read(end.begin, end.size);
  Fields fields(text, source);
  for (std::int64_t i = 0; i < end.entries; ++i) entries_.push_back(take_entry(fields, archive));
  require<CorruptCheckpoint>(fields.left() == 0,
                             "{}: {} bytes follow the {} entries of the zip directory", source,
                             fields.left(), end.entries);

  std::ranges::sort(entries_, {}, &ZipEntry::header);
  std::unordered_set<std::string_view> names;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    ZipEntry& entry = entries_[i];
    entry.limit = i + 1 < entries_.size() ? entries_[i + 1].header : end.begin;
    const auto header_bytes = kLocalHeaderSize + static_cast<std::int64_t>(entry.name.size());
    require<CorruptCheckpoint>(
        entry.header <= entry.limit && entry.limit - entry.header >= header_bytes &&
            entry.size <= entry.limit - entry.header - header_bytes,
        "{}: zip entry {} of {} bytes at {} exceeds {}, where the next part begins", source,
        entry.name, entry.size, entry.header, entry.limit);
    require<CorruptCheckpoint>(names.insert(entry.name).second,
                               "{}: duplicate zip entry {} in the directory", source, entry.name);
  }
}

const ZipEntry* ZipDirectory::find(const std::string& name) const {
  const auto found = std::ranges::find(entries_, name, &ZipEntry::name);
  return found == entries_.end() ? nullptr : &*found;
}

std::int64_t zip_data_begin(const ByteRange& archive, const ZipEntry& entry) {
  const std::string where = fmt::format("{}: zip entry {}", archive.name(), entry.name);
  const std::int64_t name_size = static_cast<std::int64_t>(entry.name.size());
  const std::string text = archive.read(entry.header, kLocalHeaderSize + name_size);
  Fields fields(text, where);
  require<CorruptCheckpoint>(fields.take<std::uint32_t>() == kLocalHeader,
                             "{} has no local header at {}", where, entry.header);
  fields.skip(4);  // version, flags
  const auto method = fields.take<std::uint16_t>();
  fields.skip(16);  // time, checksum and sizes, left empty by streaming writers
  const auto local_name_size = fields.take<std::uint16_t>();
  const auto extra_size = fields.take<std::uint16_t>();
  require<CorruptCheckpoint>(
      method == 0 && local_name_size == name_size &&
          fields.take_bytes(static_cast<std::size_t>(name_size)) == entry.name,
      "{}: the local header at {} belongs to another entry", where, entry.header);
  const std::int64_t begin = entry.header + kLocalHeaderSize + name_size + extra_size;
  require<CorruptCheckpoint>(begin <= entry.limit && entry.size <= entry.limit - begin,
                             "{}: {} bytes at {} exceed {}, where the next part begins", where,
                             entry.size, begin, entry.limit);
  return begin;
}

std::string read_zip_entry(const ByteRange& archive, const ZipEntry& entry,
                           std::int64_t max_bytes) {
  require<CorruptCheckpoint>(entry.size <= max_bytes,
                             "{}: zip entry {} has {} bytes; at most {} are accepted",
                             archive.name(), entry.name, entry.size, max_bytes);
  std::string content = archive.read(zip_data_begin(archive, entry), entry.size);
  const std::uint32_t crc = crc32(content.data(), content.size());
  require<CorruptCheckpoint>(entry.crc32 == 0 || crc == entry.crc32,
                             "{}: the checksum of zip entry {} is wrong: found {:08x}, expected "
                             "{:08x}",
                             archive.name(), entry.name, crc, entry.crc32);
  return content;
}

}  // namespace tessera::io
