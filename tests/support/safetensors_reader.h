#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/shape.h"
#include "io/base/convert.h"
#include "io/safetensors/header.h"

namespace tessera::test {

/// A safetensors file of any name, open for reading.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const io::fs::path& path)
      : file_(io::File::open(path)), header_(io::read_safetensors_header(file_)) {}

  const io::SafetensorsHeader& header() const { return header_; }
  const io::File& file() const { return file_; }
  /// Null if there is no such tensor.
  const io::SafetensorsEntry* find(const std::string& name) const {
    const auto found = std::ranges::find(header_.tensors, name, &io::SafetensorsEntry::name);
    return found == header_.tensors.end() ? nullptr : &*found;
  }

  /// Reads elements [begin, end) of a tensor, in row-major order, converted to `dtype`.
  void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
            DType dtype) const {
    const io::SafetensorsEntry* const entry = find(name);
    require(entry != nullptr, "{} holds no tensor {}", file_.path().string(), name);
    const std::size_t width = dtype_size(entry->dtype.value());
    std::vector<char> stored(static_cast<std::size_t>(end - begin) * width);
    file_.read(entry->begin + begin * static_cast<std::int64_t>(width), stored.data(),
               stored.size());
    io::convert_elements(*entry->dtype, stored.data(), dtype, out, end - begin);
  }

 private:
  io::File file_;
  io::SafetensorsHeader header_;
};

/// Dtype, shape and bytes of each tensor in a file.
inline std::map<std::string, std::string> tensors_of(const io::fs::path& path) {
  std::map<std::string, std::string> found;
  const SafetensorsReader file(path);
  for (const io::SafetensorsEntry& entry : file.header().tensors) {
    std::string bytes(static_cast<std::size_t>(entry.end - entry.begin), '?');
    file.file().read(entry.begin, bytes.data(), bytes.size());
    found[entry.name] = fmt::format("{} {} ", entry.stored_dtype, entry.shape) + bytes;
  }
  return found;
}

}  // namespace tessera::test
