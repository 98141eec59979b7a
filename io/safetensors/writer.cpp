#include "io/safetensors/writer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/safetensors/dtype.h"

namespace tessera::io {
namespace {

std::string dump(const Json& json) {
  try {
    return json.dump();
  } catch (const Json::exception& error) {
    throw InvalidArgument("a name or metadata value is not UTF-8: {}", error.what());
  }
}

}  // namespace

SafetensorsPlan plan_safetensors(const std::vector<SafetensorsSpec>& tensors,
                                 std::map<std::string, std::string> metadata) {
  std::vector<SafetensorsSpec> sorted = tensors;
  std::sort(sorted.begin(), sorted.end(), [](const SafetensorsSpec& a, const SafetensorsSpec& b) {
    const auto width_a = dtype_size(a.dtype), width_b = dtype_size(b.dtype);
    return width_a != width_b ? width_a > width_b : a.name < b.name;
  });

  metadata["format"] = "pt";
  // As text, by name: a tree of JSON takes far more memory.
  std::map<std::string, std::string> header{{"__metadata__", dump(metadata)}};
  SafetensorsPlan plan;
  std::int64_t position = 0;  // relative to the data, as in the file
  for (const SafetensorsSpec& spec : sorted) {
    require(!spec.name.empty() && spec.name.size() <= kMaxTensorName,
            "a tensor's name must have 1 to {} bytes, got {}", kMaxTensorName, spec.name.size());
    std::int64_t bytes = 0, end = 0;
    require(!__builtin_mul_overflow(numel(spec.shape),
                                    static_cast<std::int64_t>(dtype_size(spec.dtype)), &bytes) &&
                !__builtin_add_overflow(position, bytes, &end),
            "tensor {} of shape {} ends past 2^63 bytes", spec.name, spec.shape);
    const bool is_new =
        header
            .emplace(spec.name,
                     fmt::format(R"({{"data_offsets":[{},{}],"dtype":"{}","shape":[{}]}})",
                                 position, end, safetensors_dtype_name(spec.dtype),
                                 fmt::join(spec.shape.begin(), spec.shape.end(), ",")))
            .second;
    require(is_new, "the tensor name {} stands twice or is reserved", spec.name);
    plan.tensors.push_back({spec.name, std::string(safetensors_dtype_name(spec.dtype)), spec.dtype,
                            spec.shape, position, end});
    position = end;
  }

  std::string text = "{";
  for (const auto& [name, value] : header) {
    if (text.size() > 1) text += ',';
    text += dump(name) + ':' + value;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  require(static_cast<std::int64_t>(text.size()) <= kMaxSafetensorsHeader,
          "the header of {} tensors takes {} bytes; at most {} are allowed", tensors.size(),
          text.size(), kMaxSafetensorsHeader);
  const std::uint64_t length = text.size();
  plan.preamble.resize(8);
  std::memcpy(plan.preamble.data(), &length, 8);
  plan.preamble += text;

  const auto data_begin = static_cast<std::int64_t>(plan.preamble.size());
  for (SafetensorsEntry& entry : plan.tensors) {
    entry.begin += data_begin;
    entry.end += data_begin;
  }
  plan.file_size = data_begin + position;
  return plan;
}

}  // namespace tessera::io
