#include "io/safetensors/reader.h"

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "io/base/convert.h"

namespace tessera::io {

void SafetensorsReader::read(const std::string& name, std::int64_t begin, std::int64_t end,
                             void* out, DType dtype) const {
  const SafetensorsEntry* entry = header_.find(name);
  require(entry != nullptr, "{} holds no tensor {}", file_.path().string(), name);
  require(begin >= 0 && begin <= end && end <= numel(entry->shape),
          "elements {} to {} are outside tensor {} of shape {}", begin, end, name, entry->shape);
  require<Unsupported>(entry->dtype.has_value(),
                       "tensor {} of {} is stored as {}, which tessera "
                       "does not read",
                       name, file_.path().string(), entry->stored_dtype);
  const auto width = static_cast<std::int64_t>(dtype_size(*entry->dtype));
  read_elements(file_, entry->begin + begin * width, *entry->dtype, end - begin, dtype, out);
}

void read_elements(const File& file, std::int64_t offset, DType stored, std::int64_t n, DType dtype,
                   void* out) {
  const std::size_t width = dtype_size(stored);
  if (stored == dtype) {
    file.read(offset, out, static_cast<std::size_t>(n) * width);
    return;
  }
  const auto per_piece = static_cast<std::int64_t>((std::size_t{1} << 20) / width);
  std::vector<char> scratch(static_cast<std::size_t>(std::min(n, per_piece)) * width);
  auto* target = static_cast<char*>(out);
  for (std::int64_t done = 0; done < n; done += per_piece) {
    const std::int64_t count = std::min(per_piece, n - done);
    file.read(offset + done * static_cast<std::int64_t>(width), scratch.data(),
              static_cast<std::size_t>(count) * width);
    convert_elements(stored, scratch.data(), dtype, target, count);
    target += static_cast<std::size_t>(count) * dtype_size(dtype);
  }
}

}  // namespace tessera::io
