#include "io/consolidate/tensor_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"

namespace tessera::io {
namespace {

// Metadata that marks exports, because --overwrite may replace an export but no other model.
constexpr const char* kWriter = "writer";
constexpr const char* kTessera = "tessera ";

}  // namespace

std::vector<ExportFile> plan_tensor_files(const std::vector<ExportTensor>& tensors,
                                          const std::string& stem, std::int64_t max_shard_size,
                                          std::map<std::string, std::string> metadata) {
  metadata[kWriter] = kTessera + std::string(TESSERA_VERSION);
  std::vector<const ExportTensor*> sorted;
  for (const ExportTensor& tensor : tensors) sorted.push_back(&tensor);
  std::ranges::sort(sorted, {}, &ExportTensor::name);
  std::vector<ExportFile> files(1);
  std::int64_t filled = 0;
  for (const ExportTensor* tensor : sorted) {
    const std::int64_t bytes = tensor->bytes();
    if (!files.back().tensors.empty() && filled > max_shard_size - bytes) {
      files.emplace_back();
      filled = 0;
    }
    files.back().tensors.push_back(tensor);
    filled += bytes;
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    ExportFile& file = files[i];
    file.name = files.size() == 1
                    ? fmt::format("{}.safetensors", stem)
                    : fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i + 1, files.size());
    const std::vector<const ExportTensor*> by_name = std::move(file.tensors);
    std::vector<SafetensorsSpec> specs;
    specs.reserve(by_name.size());
    for (const ExportTensor* tensor : by_name) {
      specs.push_back({tensor->name, tensor->written, tensor->shape, tensor->opaque_dtype});
    }
    file.plan = plan_safetensors(specs, metadata);
    file.tensors.clear();
    for (const std::size_t t : file.plan.order) file.tensors.push_back(by_name[t]);
    for (const SafetensorsEntry& entry : file.plan.tensors) file.begins.push_back(entry.begin);
    file.plan.tensors = {};
    file.plan.order = {};
  }
  return files;
}

bool is_written_by_export(const fs::path& file) {
  try {
    const auto metadata = read_safetensors_header(File::open(file)).metadata;
    const auto writer = metadata.find(kWriter);
    return writer != metadata.end() && writer->second.starts_with(kTessera);
  } catch (const Error&) {
    return false;
  }
}

std::string tensor_files_index(std::span<const ExportFile> files) {
  Json weight_map = Json::object();
  std::int64_t total = 0;
  for (const ExportFile& file : files) {
    for (const ExportTensor* tensor : file.tensors) {
      weight_map[tensor->name] = file.name;
      total += tensor->bytes();
    }
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
  return index.dump(2) + "\n";
}

}  // namespace tessera::io
