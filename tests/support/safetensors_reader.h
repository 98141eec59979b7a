#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/base/error.h"
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

}  // namespace tessera::test
