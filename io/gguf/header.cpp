#include "io/gguf/header.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "core/base/error.h"
#include "io/safetensors/header.h"

namespace tessera::io {
namespace {

// Fewest bytes of a key and of a tensor.
constexpr std::uint64_t kLeastKey = 8 + 4 + 1, kLeastTensor = 8 + 4 + 4 + 8;
constexpr std::size_t kMaxKey = 65535;
constexpr std::int64_t kMaxAlignment = std::int64_t{1} << 20;

/// Reads values of the header of a file, in pieces.
class Input {
 public:
  explicit Input(const File& file, std::int64_t begin = 0)
      : file_(file), size_(file.size()), begin_(begin) {}

  std::int64_t position() const { return begin_ + static_cast<std::int64_t>(at_); }
  std::int64_t file_size() const { return size_; }
  /// Bytes that may follow in the header.
  std::uint64_t left() const {
    return static_cast<std::uint64_t>(
        std::max(std::min(size_, kMaxGgufHeader) - position(), std::int64_t{0}));
  }
  std::string path() const { return file_.path().string(); }

  template <typename T>
  T number(const std::string& what) {
    T value{};
    std::memcpy(&value, take(sizeof(T), what), sizeof(T));
    return value;
  }
  std::size_t text_size(std::size_t most, const std::string& what) {
    const auto length = number<std::uint64_t>(what);
    require<CorruptCheckpoint>(length <= std::min<std::uint64_t>(most, left()),
                               "{}: {}: a string of {} bytes, but at most {} can follow", path(),
                               what, length, std::min<std::uint64_t>(most, left()));
    return length;
  }
  /// @return valid until the next read
  std::string_view text(std::size_t most, const std::string& what) {
    const std::size_t length = text_size(most, what);
    return {take(length, what), length};
  }
  /// @param bytes  at most left()
  void skip(std::size_t bytes) {
    if (bytes <= buffer_.size() - at_) {
      at_ += bytes;
      return;
    }
    begin_ = position() + static_cast<std::int64_t>(bytes);
    buffer_.clear();
    at_ = 0;
  }

 private:
  const char* take(std::size_t bytes, const std::string& what) {
    require<CorruptCheckpoint>(
        bytes <= left(),
        "{}: {}: the file ends after {} bytes, or has more than {} before its data", path(), what,
        size_, kMaxGgufHeader);
    if (buffer_.size() - at_ < bytes) {
      begin_ += static_cast<std::int64_t>(at_);
      at_ = 0;
      buffer_.resize(static_cast<std::size_t>(std::min<std::int64_t>(
          std::max<std::int64_t>(static_cast<std::int64_t>(bytes), kPiece), size_ - begin_)));
      file_.read(begin_, buffer_.data(), buffer_.size());
    }
    at_ += bytes;
    return buffer_.data() + at_ - bytes;
  }

  static constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  const File& file_;
  const std::int64_t size_;
  std::vector<char> buffer_;
  std::int64_t begin_;  // of the buffer in the file
  std::size_t at_ = 0;
};

// Bytes of a value; 0 for strings and arrays. @throws CorruptCheckpoint on an unknown type
std::size_t value_size(Input& input, std::uint32_t type, const std::string& what) {
  constexpr std::size_t kSizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  require<CorruptCheckpoint>(type < std::size(kSizes), "{}: {} has a value of unknown type {}",
                             input.path(), what, type);
  return kSizes[type];
}

Json scalar(Input& input, GgufType type, const std::string& what) {
  switch (type) {
    case GgufType::U8:
      return input.number<std::uint8_t>(what);
    case GgufType::I8:
      return input.number<std::int8_t>(what);
    case GgufType::U16:
      return input.number<std::uint16_t>(what);
    case GgufType::I16:
      return input.number<std::int16_t>(what);
    case GgufType::U32:
      return input.number<std::uint32_t>(what);
    case GgufType::I32:
      return input.number<std::int32_t>(what);
    case GgufType::F32:
      return input.number<float>(what);
    case GgufType::Bool: {
      const auto value = input.number<std::uint8_t>(what);
      require<CorruptCheckpoint>(value <= 1, "{}: {} is a boolean of value {}", input.path(), what,
                                 value);
      return value == 1;
    }
    case GgufType::String:
      return std::string(input.text(kMaxGgufHeader, what));
    case GgufType::U64:
      return input.number<std::uint64_t>(what);
    case GgufType::I64:
      return input.number<std::int64_t>(what);
    case GgufType::F64:
      return input.number<double>(what);
    case GgufType::Array:
      break;
  }
  throw InternalError("{}: {} is an array", input.path(), what);
}

// Skips the values of an array.
GgufArray read_array(Input& input, const std::string& what) {
  const auto type = input.number<std::uint32_t>(what);
  const std::size_t size = value_size(input, type, what);
  GgufArray array{static_cast<GgufType>(type)};
  require<CorruptCheckpoint>(array.type != GgufType::Array,
                             "{}: {} is an array in an array, which is not accepted", input.path(),
                             what);
  array.count = input.number<std::uint64_t>(what);
  array.begin = input.position();
  const std::uint64_t most = input.left() / (size == 0 ? 8 : size);
  require<CorruptCheckpoint>(array.count <= most, "{}: {} has {} values, but at most {} can follow",
                             input.path(), what, array.count, most);
  input.skip(size * array.count);
  if (array.type == GgufType::String)
    for (std::uint64_t i = 0; i < array.count; ++i)
      input.skip(input.text_size(kMaxGgufHeader, what));
  return array;
}

void read_key(Input& input, GgufHeader& header, const std::string& key) {
  const auto type = input.number<std::uint32_t>(key);
  value_size(input, type, key);
  const bool is_array = static_cast<GgufType>(type) == GgufType::Array;
  if (is_array) header.arrays[key] = read_array(input, key);
  require<CorruptCheckpoint>(
      header.keys
          .emplace(key, is_array ? Json::array() : scalar(input, static_cast<GgufType>(type), key))
          .second,
      "{}: the key {} is there twice", input.path(), key);
}

void check_name(const Input& input, const std::string& name, const char* what) {
  require<CorruptCheckpoint>(!name.empty() && name.find('\0') == std::string::npos,
                             "{}: the name of a {} is empty or contains a NUL", input.path(), what);
}

// @return with `begin` relative to the data, and `end` the number of bytes
GgufEntry read_tensor(Input& input) {
  GgufEntry entry;
  entry.name = input.text(kMaxTensorName, "the name of a tensor");
  check_name(input, entry.name, "tensor");
  const std::string what = "tensor " + entry.name;
  const auto dims = input.number<std::uint32_t>(what);
  require<CorruptCheckpoint>(dims <= kGgufDims, "{}: {} has {} dims; at most {} are allowed",
                             input.path(), what, dims, kGgufDims);
  std::vector<std::int64_t> sizes(dims);
  std::int64_t elements = 1;
  for (std::uint32_t i = 0; i < dims; ++i) {
    const auto size = input.number<std::uint64_t>(what);
    require<CorruptCheckpoint>(
        size <= INT64_MAX &&
            !__builtin_mul_overflow(elements, static_cast<std::int64_t>(size), &elements),
        "{}: {} has a size of {}: more than 2^63 elements", input.path(), what, size);
    sizes[dims - 1 - i] = static_cast<std::int64_t>(size);
  }
  entry.shape = Shape(sizes);
  const auto type = input.number<std::uint32_t>(what);
  entry.elements = find_gguf_elements(type);
  require<CorruptCheckpoint>(entry.elements != nullptr, "{}: {} has elements of unknown type {}",
                             input.path(), what, type);
  const EncodingUnit unit = entry.elements->unit;
  const std::int64_t row = dims == 0 ? 1 : sizes.back();
  require<CorruptCheckpoint>(row % unit.elements == 0,
                             "{}: {} of shape {} has rows that are no multiples of {}, as {} needs",
                             input.path(), what, entry.shape, unit.elements, entry.elements->name);
  const auto offset = input.number<std::uint64_t>(what);
  require<CorruptCheckpoint>(
      offset <= INT64_MAX &&
          !__builtin_mul_overflow(elements / unit.elements, unit.bytes, &entry.end),
      "{}: {} of shape {} at byte {} ends past 2^63", input.path(), what, entry.shape, offset);
  entry.begin = static_cast<std::int64_t>(offset);
  return entry;
}

const GgufArray& find_array(const File& file, const GgufHeader& header, const std::string& key) {
  const auto found = header.arrays.find(key);
  require<CorruptCheckpoint>(found != header.arrays.end(), "{} has no array {}",
                             file.path().string(), key);
  return found->second;
}

}  // namespace

bool is_gguf(const fs::path& path) {
  try {
    const File file = File::open(path);
    char magic[4] = {};
    if (file.size() < 4) return false;
    file.read(0, magic, sizeof(magic));
    return std::string_view(magic, 4) == kGgufMagic;
  } catch (const Error&) {
    return false;
  }
}

GgufHeader read_gguf_header(const File& file) {
  Input input(file);
  const std::string path = input.path();
  std::string magic;
  for (int i = 0; i < 4; ++i) magic += input.number<char>("the magic");
  require<CorruptCheckpoint>(magic == kGgufMagic, "{} is no GGUF file: it does not begin with {}",
                             path, kGgufMagic);
  const auto version = input.number<std::uint32_t>("the version");
  require<Unsupported>(version <= 0xffff, "{} is a big-endian GGUF file, or damaged", path);
  require<Unsupported>(version == 2 || version == kGgufVersion,
                       "{} is a GGUF file of version {}; 2 and 3 are read", path, version);
  const auto tensors = input.number<std::uint64_t>("the number of tensors");
  const auto count = input.number<std::uint64_t>("the number of keys");
  require<CorruptCheckpoint>(
      count <= input.left() / kLeastKey && tensors <= input.left() / kLeastTensor,
      "{}: {} keys and {} tensors do not fit into its {} bytes", path, count, tensors,
      input.file_size());
  require<Unsupported>(count <= kMaxGgufEntries && tensors <= kMaxGgufEntries,
                       "{} has {} keys and {} tensors; at most {} of each are read", path, count,
                       tensors, kMaxGgufEntries);

  GgufHeader header;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string key(input.text(kMaxKey, "a key"));
    check_name(input, key, "key");
    read_key(input, header, key);
  }
  std::int64_t alignment = kGgufAlignment;
  if (const auto found = header.keys.find("general.alignment"); found != header.keys.end()) {
    const JsonReader value(*found, path + ": general.alignment");
    alignment = value.integer(1, kMaxAlignment);
    require<CorruptCheckpoint>((alignment & (alignment - 1)) == 0 && alignment >= 8,
                               "{}: general.alignment is {}, not a power of two from 8 on", path,
                               alignment);
  }
  if (const auto split = header.keys.find("split.count"); split != header.keys.end())
    require<Unsupported>(*split == 1 || *split == 0,
                         "{} is one of {} parts of a model; join them by llama-gguf-split --merge",
                         path, split->dump());

  std::unordered_set<std::string> names;
  for (std::uint64_t i = 0; i < tensors; ++i) {
    header.tensors.push_back(read_tensor(input));
    require<CorruptCheckpoint>(names.insert(header.tensors.back().name).second,
                               "{}: tensor {} is there twice", path, header.tensors.back().name);
  }
  const std::int64_t data = (input.position() + alignment - 1) / alignment * alignment;
  for (GgufEntry& entry : header.tensors) {
    require<CorruptCheckpoint>(entry.begin % alignment == 0,
                               "{}: tensor {} begins at byte {} of the data, which is no multiple "
                               "of its alignment {}",
                               path, entry.name, entry.begin, alignment);
    std::int64_t end = 0;
    require<CorruptCheckpoint>(!__builtin_add_overflow(data, entry.begin, &entry.begin) &&
                                   !__builtin_add_overflow(entry.begin, entry.end, &end) &&
                                   end <= input.file_size(),
                               "{}: tensor {} is {} bytes from byte {} on, but the file has {}",
                               path, entry.name, entry.end, entry.begin, input.file_size());
    entry.end = end;
  }
  std::ranges::sort(header.tensors, {},
                    [](const GgufEntry& entry) { return std::pair(entry.begin, entry.end); });
  for (std::size_t i = 1; i < header.tensors.size(); ++i) {
    const GgufEntry &before = header.tensors[i - 1], &entry = header.tensors[i];
    require<CorruptCheckpoint>(before.end <= entry.begin,
                               "{}: tensor {} begins at byte {}, inside {}, which ends at {}", path,
                               entry.name, entry.begin, before.name, before.end);
  }
  return header;
}

void visit_gguf_strings(const File& file, const GgufHeader& header, const std::string& key,
                        const std::function<void(std::string_view)>& visit) {
  const GgufArray& array = find_array(file, header, key);
  Input input(file, array.begin);
  require<CorruptCheckpoint>(array.type == GgufType::String, "{}: {} is no array of strings",
                             input.path(), key);
  for (std::uint64_t i = 0; i < array.count; ++i) visit(input.text(kMaxGgufHeader, key));
}

std::vector<double> read_gguf_numbers(const File& file, const GgufHeader& header,
                                      const std::string& key, std::uint64_t count) {
  const GgufArray& array = find_array(file, header, key);
  Input input(file, array.begin);
  require<CorruptCheckpoint>(array.type != GgufType::String && array.type != GgufType::Bool,
                             "{}: {} is no array of numbers", input.path(), key);
  require<CorruptCheckpoint>(array.count == count, "{}: {} has {} values, not {}", input.path(),
                             key, array.count, count);
  std::vector<double> values(count);
  for (double& value : values) value = scalar(input, array.type, key).get<double>();
  return values;
}

}  // namespace tessera::io
