#pragma once

// Builds pickles and zip archives piece by piece, including malformed ones.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::test {

template <typename T>
std::string bytes_of(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

namespace pickled {

inline std::string program(const std::string& body) { return "\x80\x04" + body + "."; }
inline std::string text(std::string_view s) {
  return "X" + bytes_of(static_cast<std::uint32_t>(s.size())) + std::string(s);
}
inline std::string integer(std::int64_t value) { return "\x8a\x08" + bytes_of(value); }
inline std::string global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
inline std::string tuple(const std::vector<std::string>& items) {
  std::string body = "(";
  for (const std::string& item : items) body += item;
  return body + "t";
}
inline std::string list(const std::vector<std::string>& items) {
  std::string body = "](";
  for (const std::string& item : items) body += item;
  return body + "e";
}
inline std::string dict(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string body = "}(";
  for (const auto& [key, value] : items) body += key + value;
  return body + "u";
}
inline std::string call(const std::string& callee, const std::vector<std::string>& args) {
  return callee + tuple(args) + "R";
}
inline std::string object(const std::string& cls,
                          const std::vector<std::pair<std::string, std::string>>& fields) {
  std::vector<std::pair<std::string, std::string>> items;
  for (const auto& [key, value] : fields) items.emplace_back(text(key), value);
  return cls + ")\x81" + dict(items) + "b";
}

}  // namespace pickled

/// One entry of a zip archive, with fields to falsify.
struct ZipPart {
  std::string name, data;
  std::uint32_t crc32 = 0;
  std::uint16_t flags = 0, method = 0, disk = 0;
  std::uint32_t size_added = 0;  ///< added to the size in the directory
  bool zip64 = false;            ///< sizes and position in an extra field
  std::string extra = {};        ///< of the local header
  std::string local_name = {};   ///< name in the local header, if different
  bool local_differs = false;    ///< flags and method only in the directory
};

struct ZipFile {
  std::vector<ZipPart> parts;
  bool zip64 = false;
  std::uint16_t entries_added = 0, disk = 0;
  std::uint32_t directory_moved = 0, directory_added = 0;
  std::string between = {};  ///< bytes before the directory
  std::string comment = {};

  std::string bytes() const {
    std::string archive, directory;
    for (const ZipPart& part : parts) {
      const auto begin = archive.size();
      const std::string& local = part.local_name.empty() ? part.name : part.local_name;
      archive += bytes_of<std::uint32_t>(0x04034b50) + std::string(2, '\0') +
                 bytes_of(part.local_differs ? std::uint16_t{0} : part.flags) +
                 bytes_of(part.local_differs ? std::uint16_t{0} : part.method) +
                 std::string(16, '\0') + bytes_of(static_cast<std::uint16_t>(local.size())) +
                 bytes_of(static_cast<std::uint16_t>(part.extra.size())) + local + part.extra +
                 part.data;
      const auto size = static_cast<std::uint32_t>(part.data.size()) + part.size_added;
      const std::string extra =
          part.zip64 ? bytes_of<std::uint16_t>(1) + bytes_of<std::uint16_t>(24) +
                           bytes_of<std::uint64_t>(size) + bytes_of<std::uint64_t>(size) +
                           bytes_of<std::uint64_t>(begin)
                     : "";
      const std::uint32_t shown = part.zip64 ? 0xffffffff : size;
      directory +=
          bytes_of<std::uint32_t>(0x02014b50) + std::string(4, '\0') + bytes_of(part.flags) +
          bytes_of(part.method) + std::string(4, '\0') + bytes_of(part.crc32) + bytes_of(shown) +
          bytes_of(shown) + bytes_of(static_cast<std::uint16_t>(part.name.size())) +
          bytes_of(static_cast<std::uint16_t>(extra.size())) + std::string(2, '\0') +
          bytes_of(part.disk) + std::string(6, '\0') +
          bytes_of(part.zip64 ? 0xffffffff : static_cast<std::uint32_t>(begin)) + part.name + extra;
    }
    archive += between;
    const auto begin = archive.size() + directory_moved;
    const auto size = directory.size() + directory_added;
    const auto entries = parts.size() + entries_added;
    archive += directory;
    if (zip64) {
      const auto record = archive.size();
      archive += bytes_of<std::uint32_t>(0x06064b50) + bytes_of<std::uint64_t>(44) +
                 std::string(12, '\0') + bytes_of<std::uint64_t>(entries) +
                 bytes_of<std::uint64_t>(entries) + bytes_of<std::uint64_t>(size) +
                 bytes_of<std::uint64_t>(begin);
      archive += bytes_of<std::uint32_t>(0x07064b50) + bytes_of<std::uint32_t>(disk) +
                 bytes_of<std::uint64_t>(record) + bytes_of<std::uint32_t>(1);
    }
    const bool hidden = zip64;
    archive += bytes_of<std::uint32_t>(0x06054b50) + bytes_of(disk) + bytes_of(disk);
    for (int i = 0; i < 2; ++i) {
      archive += bytes_of(hidden ? std::uint16_t{0xffff} : static_cast<std::uint16_t>(entries));
    }
    archive += bytes_of(hidden ? 0xffffffff : static_cast<std::uint32_t>(size)) +
               bytes_of(hidden ? 0xffffffff : static_cast<std::uint32_t>(begin)) +
               bytes_of(static_cast<std::uint16_t>(comment.size())) + comment;
    return archive;
  }
};

}  // namespace tessera::test
