// Source of the format: PKWARE's APPNOTE.TXT 6.3, and the archives that PyTorch 2.15 writes.

#include "io/zip/zip_writer.h"

#include <bit>
#include <initializer_list>
#include <type_traits>

#include "core/base/error.h"
#include "io/base/crc.h"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "zip is little-endian");

constexpr std::int64_t kInZip64Field = 0xffffffff;  // in place of a value in the zip64 field
constexpr std::uint16_t kFlags = 0x0808;            // UTF-8 names, checksums behind the data

template <typename T>
void put_field(std::string& out, T value) {
  static_assert(std::is_integral_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void put_size(std::string& out, std::int64_t value) {
  put_field(out, static_cast<std::uint32_t>(value < kInZip64Field ? value : kInZip64Field));
}

// The zip64 field of those of the values that exceed 32 bits; empty if there are none.
std::string zip64_field(std::initializer_list<std::int64_t> values) {
  std::string large;
  for (const std::int64_t value : values)
    if (value >= kInZip64Field) put_field(large, value);
  if (large.empty()) return large;
  std::string field;
  put_field(field, std::uint16_t{1});
  put_field(field, static_cast<std::uint16_t>(large.size()));
  return field + large;
}

}  // namespace

void ZipWriter::put(std::string bytes) {
  const std::int64_t at = end_;
  end_ += std::ssize(bytes);
  literals_.push_back({at, std::move(bytes)});
}

// Writes the local header, `content` or a gap of `size` bytes, and the descriptor.
void ZipWriter::begin_entry(const std::string& name, std::int64_t size, std::string_view content) {
  require(name.size() <= 0xffff, "an entry of a zip archive has a name of {} bytes", name.size());
  const bool is_reserved = content.empty() && size > 0;
  const std::int64_t header = end_ - begin_;
  const std::uint32_t crc = crc32(content.data(), content.size());
  const std::string zip64 = zip64_field({size, size, header});
  // A field named "FB" pads the header. Its content is not looked at.
  const std::int64_t before = header + 30 + std::ssize(name) + std::ssize(zip64) + 4;
  const std::int64_t padding = (kAlignment - before % kAlignment) % kAlignment;
  std::string text("PK\3\4", 4);
  put_field(text, std::uint16_t{0});  // version
  put_field(text, kFlags);
  text.append(18, '\0');  // method, time, checksum and sizes
  put_field(text, static_cast<std::uint16_t>(name.size()));
  put_field(text, static_cast<std::uint16_t>(std::ssize(zip64) + 4 + padding));
  text += name + zip64 + "FB";
  put_field(text, static_cast<std::uint16_t>(padding));
  put(std::move(text));
  end_ += padding;
  const std::int64_t data = end_;
  if (is_reserved)
    end_ += size;
  else if (!content.empty())
    put(std::string(content));
  std::string descriptor("PK\7\x8", 4);
  const std::int64_t crc32_at = end_ + std::ssize(descriptor);
  put_field(descriptor, crc);
  for (int i = 0; i < 2; ++i) {
    if (size < kInZip64Field)
      put_size(descriptor, size);
    else
      put_field(descriptor, size);
  }
  put(std::move(descriptor));
  entries_.push_back({name, size, header, crc, is_reserved});
  if (is_reserved) data_.push_back({data, {crc32_at, 0}});
}

void ZipWriter::add(const std::string& name, std::string_view content) {
  begin_entry(name, std::ssize(content), content);
}

void ZipWriter::reserve(const std::string& name, std::int64_t bytes) {
  begin_entry(name, bytes, {});
}

void ZipWriter::finish() {
  const std::int64_t directory = end_ - begin_;
  std::string text;
  auto data = data_.begin();
  for (const Entry& entry : entries_) {
    const std::string zip64 = zip64_field({entry.size, entry.size, entry.header});
    text.append("PK\1\2\0\0\0\0", 8);  // versions
    put_field(text, kFlags);
    text.append(6, '\0');  // method, time
    if (entry.is_reserved) (data++)->crc32_at[1] = end_ + std::ssize(text);
    put_field(text, entry.crc32);
    put_size(text, entry.size);
    put_size(text, entry.size);
    put_field(text, static_cast<std::uint16_t>(entry.name.size()));
    put_field(text, static_cast<std::uint16_t>(zip64.size()));
    text.append(10, '\0');  // comment, disk, attributes
    put_size(text, entry.header);
    text += entry.name + zip64;
  }
  const std::int64_t size = std::ssize(text), end64 = directory + size;
  const auto count = std::ssize(entries_);
  text.append("PK\6\6", 4);
  put_field(text, std::int64_t{44});  // bytes that follow
  put_field(text, std::uint16_t{45});
  put_field(text, std::uint16_t{45});
  text.append(8, '\0');  // disks
  put_field(text, std::int64_t{count});
  put_field(text, std::int64_t{count});
  put_field(text, size);
  put_field(text, directory);
  text.append("PK\6\7\0\0\0\0", 8);
  put_field(text, end64);
  put_field(text, std::uint32_t{1});  // files
  text.append("PK\5\6\0\0\0\0", 8);
  const auto few = static_cast<std::uint16_t>(count < 0xffff ? count : 0xffff);
  put_field(text, few);
  put_field(text, few);
  put_size(text, size);
  put_size(text, directory);
  text.append(2, '\0');  // comment
  put(std::move(text));
  entries_ = {};
}

}  // namespace tessera::io
