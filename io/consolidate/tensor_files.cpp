#include "io/consolidate/tensor_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/safetensors/reader.h"

namespace tessera::io {
namespace {

// Metadata that distinguishes exports, which --overwrite may replace, from other models.
constexpr const char* kWriter = "writer";
constexpr const char* kTessera = "tessera ";

// Order of plan_safetensors.
bool is_before(const ExportTensor* a, const ExportTensor* b) {
  const auto width_a = dtype_size(a->written), width_b = dtype_size(b->written);
  return width_a != width_b ? width_a > width_b : a->name < b->name;
}

}  // namespace

std::vector<ExportFile> plan_tensor_files(const std::vector<ExportTensor>& tensors,
                                          const std::string& stem, std::int64_t max_shard_size,
                                          std::map<std::string, std::string> metadata) {
  metadata[kWriter] = kTessera + std::string(TESSERA_VERSION);
  std::vector<const ExportTensor*> sorted;
  for (const ExportTensor& tensor : tensors) sorted.push_back(&tensor);
  std::sort(sorted.begin(), sorted.end(),
            [](const ExportTensor* a, const ExportTensor* b) { return a->name < b->name; });
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
    std::vector<SafetensorsSpec> specs;
    specs.reserve(file.tensors.size());
    std::sort(file.tensors.begin(), file.tensors.end(), is_before);
    for (const ExportTensor* tensor : file.tensors) {
      specs.push_back({tensor->name, tensor->written, tensor->shape, tensor->opaque_dtype});
    }
    file.plan = plan_safetensors(specs, metadata);
    for (std::size_t t = 0; t < specs.size(); ++t) {
      if (file.plan.tensors[t].name != file.tensors[t]->name) {
        throw InternalError("{} is at another offset than planned", file.tensors[t]->name);
      }
      file.begins.push_back(file.plan.tensors[t].begin);
    }
    file.plan.tensors = {};
  }
  return files;
}

bool is_written_by_export(const fs::path& file) {
  try {
    const SafetensorsReader reader(file);
    const auto writer = reader.header().metadata.find(kWriter);
    return writer != reader.header().metadata.end() && writer->second.starts_with(kTessera);
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
