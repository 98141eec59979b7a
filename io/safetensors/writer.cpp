#include "io/safetensors/writer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/safetensors/dtype.h"

namespace tessera::io {
namespace {

constexpr const char* kMetadata = "__metadata__";

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
  SafetensorsPlan plan;
  plan.order.resize(tensors.size());
  std::iota(plan.order.begin(), plan.order.end(), std::size_t{0});
  std::ranges::sort(plan.order, {}, [&](std::size_t i) {
    return std::pair(-static_cast<int>(dtype_size(tensors[i].dtype)),
                     std::string_view(tensors[i].name));
  });

  std::int64_t position = 0;  // from the start of the data, as data_offsets are
  for (const std::size_t i : plan.order) {
    const SafetensorsSpec* const spec = &tensors[i];
    require(!spec->name.empty() && spec->name.size() <= kMaxTensorName,
            "a tensor name must have 1 to {} bytes, got {}", kMaxTensorName, spec->name.size());
    std::int64_t bytes = 0, end = 0;
    require(!__builtin_mul_overflow(numel(spec->shape),
                                    static_cast<std::int64_t>(dtype_size(spec->dtype)), &bytes) &&
                !__builtin_add_overflow(position, bytes, &end),
            "tensor {} of shape {} ends past 2^63 bytes", spec->name, spec->shape);
    const std::string stored_dtype = spec->stored_dtype.empty()
                                         ? std::string(safetensors_dtype_name(spec->dtype))
                                         : spec->stored_dtype;
    plan.tensors.push_back({spec->name, stored_dtype, spec->dtype, spec->shape, position, end});
    position = end;
  }

  // Formats the header directly, because a JSON tree would take far more memory.
  metadata["format"] = "pt";
  const SafetensorsEntry metadata_entry{kMetadata, "", {}, {}, 0, 0};
  std::vector<const SafetensorsEntry*> by_name{&metadata_entry};
  for (const SafetensorsEntry& entry : plan.tensors) by_name.push_back(&entry);
  std::ranges::sort(
      by_name, {}, [](const auto* entry) -> const auto& { return entry->name; });
  std::string& text = plan.preamble;
  text.assign(8, '\0');  // length, set below
  for (std::size_t i = 0; i < by_name.size(); ++i) {
    const SafetensorsEntry& entry = *by_name[i];
    require(i == 0 || by_name[i - 1]->name != entry.name,
            "the tensor name {} is duplicate or reserved", entry.name);
    text += i == 0 ? '{' : ',';
    text += dump(entry.name) + ':';
    if (&entry == &metadata_entry) {
      text += dump(metadata);
    } else {
      fmt::format_to(std::back_inserter(text),
                     R"({{"data_offsets":[{},{}],"dtype":"{}","shape":[{}]}})", entry.begin,
                     entry.end, entry.stored_dtype,
                     fmt::join(entry.shape.begin(), entry.shape.end(), ","));
    }
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t length = text.size() - 8;
  require(length <= static_cast<std::uint64_t>(kMaxSafetensorsHeader),
          "the header of {} tensors takes {} bytes; at most {} are allowed", tensors.size(), length,
          kMaxSafetensorsHeader);
  std::memcpy(text.data(), &length, 8);

  const auto data_begin = static_cast<std::int64_t>(plan.preamble.size());
  for (SafetensorsEntry& entry : plan.tensors) {
    entry.begin += data_begin;
    entry.end += data_begin;
  }
  plan.file_size = data_begin + position;
  return plan;
}

}  // namespace tessera::io
