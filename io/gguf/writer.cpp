#include "io/gguf/writer.h"

#include <bit>
#include <type_traits>

#include "core/base/error.h"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is little-endian");

template <typename T>
void put_bytes(std::string& out, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void put_string(std::string& out, std::string_view text) {
  put_bytes(out, std::uint64_t{text.size()});
  out += text;
}

std::int64_t round_up(std::int64_t bytes) {
  return (bytes + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment;
}

}  // namespace

void GgufKeys::begin(std::string_view key, GgufType type) {
  put_string(bytes_, key);
  put_bytes(bytes_, type);
  ++count_;
}

void GgufKeys::begin_array(std::string_view key, GgufType type, std::size_t count) {
  begin(key, GgufType::Array);
  put_bytes(bytes_, type);
  put_bytes(bytes_, std::uint64_t{count});
}

void GgufKeys::add(std::string_view key, std::uint32_t value) {
  begin(key, GgufType::U32);
  put_bytes(bytes_, value);
}

void GgufKeys::add(std::string_view key, float value) {
  begin(key, GgufType::F32);
  put_bytes(bytes_, value);
}

void GgufKeys::add(std::string_view key, bool value) {
  begin(key, GgufType::Bool);
  put_bytes(bytes_, value);
}

void GgufKeys::add(std::string_view key, std::string_view value) {
  begin(key, GgufType::String);
  put_string(bytes_, value);
}

void GgufKeys::add(std::string_view key, const std::vector<std::string>& values) {
  begin_array(key, GgufType::String, values.size());
  for (const std::string& value : values) put_string(bytes_, value);
}

void GgufKeys::add(std::string_view key, const std::vector<float>& values) {
  begin_array(key, GgufType::F32, values.size());
  for (const float value : values) put_bytes(bytes_, value);
}

void GgufKeys::add(std::string_view key, const std::vector<std::int32_t>& values) {
  begin_array(key, GgufType::I32, values.size());
  for (const std::int32_t value : values) put_bytes(bytes_, value);
}

void GgufKeys::add(std::string_view key, const std::vector<bool>& values) {
  begin_array(key, GgufType::Bool, values.size());
  for (const bool value : values) put_bytes(bytes_, value);
}

GgufPlan plan_gguf(const GgufKeys& keys, const std::vector<GgufSpec>& tensors) {
  GgufPlan plan;
  std::string& text = plan.preamble;
  text = kGgufMagic;
  put_bytes(text, kGgufVersion);
  put_bytes(text, std::uint64_t{tensors.size()});
  put_bytes(text, keys.count());
  text += keys.bytes();
  std::int64_t position = 0;  // from the data's begin
  for (const GgufSpec& tensor : tensors) {
    require<Unsupported>(tensor.shape.size() <= kGgufDims,
                         "tensor {} of shape {}: GGUF has at most {} dims", tensor.name,
                         tensor.shape, kGgufDims);
    put_string(text, tensor.name);
    put_bytes(text, static_cast<std::uint32_t>(tensor.shape.size()));
    for (int i = tensor.shape.size() - 1; i >= 0; --i)
      put_bytes(text, static_cast<std::uint64_t>(tensor.shape[i]));
    put_bytes(text, tensor.elements->id);
    put_bytes(text, static_cast<std::uint64_t>(position));
    plan.begins.push_back(position);
    const EncodingUnit unit = tensor.elements->unit;
    std::int64_t bytes = 0;
    require<Unsupported>(
        !__builtin_mul_overflow(numel(tensor.shape) / unit.elements, unit.bytes, &bytes) &&
            !__builtin_add_overflow(position, bytes, &position) && position <= INT64_MAX / 2,
        "tensor {} of shape {} ends past 2^62 bytes", tensor.name, tensor.shape);
    position = round_up(position);
  }
  const std::int64_t data = round_up(static_cast<std::int64_t>(text.size()));
  text.resize(static_cast<std::size_t>(data), '\0');
  for (std::int64_t& begin : plan.begins) begin += data;
  plan.file_size = data + position;
  return plan;
}

}  // namespace tessera::io
