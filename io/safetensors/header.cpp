#include "io/safetensors/header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/safetensors/dtype.h"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

std::string read_json(const File& file, std::int64_t file_size) {
  const std::string path = file.path().string();
  require<CorruptCheckpoint>(file_size >= 8,
                             "{} has {} bytes; a safetensors file starts with 8 bytes of length",
                             path, file_size);
  char start[8];
  file.read(0, start, sizeof(start));
  require<CorruptCheckpoint>(
      std::string_view(start, 8) != "version ",
      "{} is a Git LFS pointer, not the model itself; fetch it with `git lfs pull`", path);
  std::uint64_t length = 0;
  std::memcpy(&length, start, sizeof(length));
  require<CorruptCheckpoint>(length > 0, "{}: the header's length is 0", path);
  require<CorruptCheckpoint>(length <= static_cast<std::uint64_t>(kMaxSafetensorsHeader),
                             "{}: the header's length is {} bytes; at most {} are accepted", path,
                             length, kMaxSafetensorsHeader);
  require<CorruptCheckpoint>(static_cast<std::int64_t>(length) <= file_size - 8,
                             "{}: the header's length is {} bytes, but only {} follow", path,
                             length, file_size - 8);
  std::string text(length, '\0');
  file.read(8, text.data(), text.size());
  require<CorruptCheckpoint>(text[0] == '{', "{}: the header does not start with '{{'", path);
  return text;
}

// Bytes of a tensor; -1 if they exceed 2^63 - 1 or are not a whole number.
std::int64_t byte_count(const Shape& shape, int bits) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(elements, size, &elements)) return -1;
  }
  std::int64_t total = 0;
  if (__builtin_mul_overflow(elements, std::int64_t{bits}, &total) || total % 8 != 0) return -1;
  return total / 8;
}

SafetensorsEntry parse_entry(const std::string& name, const JsonReader& json,
                             std::int64_t data_begin, std::int64_t data_size) {
  SafetensorsEntry entry;
  entry.name = name;
  entry.stored_dtype = json.at("dtype").string();
  const int bits = safetensors_dtype_bits(entry.stored_dtype);
  require<CorruptCheckpoint>(bits > 0, "{}: unknown dtype \"{}\"", json.where(),
                             entry.stored_dtype);
  entry.dtype = dtype_from_safetensors(entry.stored_dtype);
  entry.shape = parse_shape(json.at("shape"));
  const JsonReader offsets = json.at("data_offsets");
  const auto [begin, end] = parse_range(offsets);
  require<CorruptCheckpoint>(end <= data_size,
                             "{}: ends at byte {}, but the file holds {} bytes of data",
                             offsets.where(), end, data_size);
  const std::int64_t bytes = byte_count(entry.shape, bits);
  require<CorruptCheckpoint>(bytes >= 0,
                             "{}: shape {} of {} has no whole number of bytes below 2^63",
                             json.where(), entry.shape, entry.stored_dtype);
  require<CorruptCheckpoint>(bytes == end - begin,
                             "{}: shape {} of {} takes {} bytes, but data_offsets span {}",
                             json.where(), entry.shape, entry.stored_dtype, bytes, end - begin);
  entry.begin = data_begin + begin;
  entry.end = data_begin + end;
  return entry;
}

void check_coverage(const SafetensorsHeader& header, const std::string& path) {
  std::int64_t position = header.size;
  for (const SafetensorsEntry& entry : header.tensors) {
    require<CorruptCheckpoint>(entry.begin <= position,
                               "{}: bytes {} to {} before tensor {} belong to no tensor", path,
                               position, entry.begin, entry.name);
    require<CorruptCheckpoint>(
        entry.begin >= position,
        "{}: tensor {} begins at byte {}, inside the tensor before it, which "
        "ends at {}",
        path, entry.name, entry.begin, position);
    position = entry.end;
  }
  require<CorruptCheckpoint>(position == header.file_size,
                             "{}: {} bytes follow the last tensor, which ends at byte {}", path,
                             header.file_size - position, position);
}

}  // namespace

Shape parse_shape(const JsonReader& json) {
  const std::size_t dims = json.array_size();
  require<CorruptCheckpoint>(dims <= Shape::kMaxDims, "{}: {} dims; tessera reads at most {}",
                             json.where(), dims, int{Shape::kMaxDims});
  Shape shape;
  for (std::size_t i = 0; i < dims; ++i) shape.push_back(json.at(i).integer());
  return shape;
}

std::pair<std::int64_t, std::int64_t> parse_range(const JsonReader& json) {
  require<CorruptCheckpoint>(json.array_size() == 2, "{}: expected [begin, end], found {} values",
                             json.where(), json.array_size());
  const std::int64_t begin = json.at(0).integer(), end = json.at(1).integer();
  require<CorruptCheckpoint>(begin <= end, "{}: begin {} is past end {}", json.where(), begin, end);
  return {begin, end};
}

SafetensorsHeader read_safetensors_header(const File& file) {
  SafetensorsHeader header;
  header.file_size = file.size();
  const std::string path = file.path().string();
  const std::string text = read_json(file, header.file_size);
  const Json json = parse_json(text, path + " (header)", 8);
  const std::uint64_t length = text.size();
  header.crc64 = crc64(text.data(), text.size(), crc64(&length, sizeof(length)));
  header.size = 8 + static_cast<std::int64_t>(length);
  const JsonReader root(json, path);
  header.tensors.reserve(root.object().size());
  for (const auto& [name, value] : root.object().items()) {
    if (name == "__metadata__") {
      const JsonReader metadata = root.at(name);
      for (const auto& [key, text_value] : metadata.object().items()) {
        header.metadata[key] = metadata.at(key).string();
      }
      continue;
    }
    require<CorruptCheckpoint>(name.size() <= kMaxTensorName,
                               "{}: a tensor name has {} bytes; at most {} are accepted", path,
                               name.size(), kMaxTensorName);
    require<CorruptCheckpoint>(name.find('\0') == std::string::npos,
                               "{}: a tensor name contains a NUL", path);
    header.tensors.push_back(
        parse_entry(name, root.at(name), header.size, header.file_size - header.size));
  }
  std::ranges::sort(header.tensors, {}, [](const SafetensorsEntry& entry) {
    return std::pair(entry.begin, entry.end);
  });
  check_coverage(header, path);
  return header;
}

}  // namespace tessera::io
