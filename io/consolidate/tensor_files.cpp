#include "io/consolidate/tensor_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "io/base/json.h"

namespace tessera::io {
namespace {

// Metadata that marks exports, because --overwrite may replace an export but no other model.
constexpr const char* kWriter = "writer";
constexpr const char* kTessera = "tessera ";

}  // namespace

std::vector<std::vector<const ExportTensor*>> fill_files(const std::vector<ExportTensor>& tensors,
                                                         std::int64_t max_shard_size) {
  std::vector<const ExportTensor*> sorted;
  for (const ExportTensor& tensor : tensors) sorted.push_back(&tensor);
  std::ranges::sort(sorted, {}, &ExportTensor::name);
  std::vector<std::vector<const ExportTensor*>> files(1);
  std::int64_t filled = 0;
  for (const ExportTensor* tensor : sorted) {
    const std::int64_t bytes = tensor->bytes();
    if (!files.back().empty() && filled > max_shard_size - bytes) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(tensor);
    filled += bytes;
  }
  return files;
}

void require_utf8(const std::string& name) {
  try {
    static_cast<void>(Json(name).dump());
  } catch (const Json::exception& error) {
    throw InvalidArgument("the name of a tensor is not UTF-8: {}", error.what());
  }
}

std::string numbered_name(std::string_view stem, std::string_view extension, std::size_t i,
                          std::size_t files) {
  return files == 1 ? fmt::format("{}{}", stem, extension)
                    : fmt::format("{}-{:05}-of-{:05}{}", stem, i + 1, files, extension);
}

bool is_file_of(std::string_view name, std::string_view stem, std::string_view extension) {
  if (!name.starts_with(stem)) return false;
  std::string rest(name.substr(stem.size()));
  for (char& c : rest)
    if (c >= '0' && c <= '9') c = '0';
  return rest == extension || rest == fmt::format("{}.index.json", extension) ||
         rest == fmt::format("-00000-of-00000{}", extension);
}

std::vector<ExportFile> plan_tensor_files(const std::vector<ExportTensor>& tensors,
                                          const std::string& stem, std::int64_t max_shard_size,
                                          std::map<std::string, std::string> metadata) {
  metadata[kWriter] = kTessera + std::string(TESSERA_VERSION);
  const auto contents = fill_files(tensors, max_shard_size);
  std::vector<ExportFile> files(contents.size());
  for (std::size_t i = 0; i < files.size(); ++i) {
    ExportFile& file = files[i];
    file.name = numbered_name(stem, ".safetensors", i, files.size());
    std::vector<SafetensorsSpec> specs;
    specs.reserve(contents[i].size());
    for (const ExportTensor* tensor : contents[i]) {
      specs.push_back({tensor->name, tensor->written, tensor->shape, tensor->opaque_dtype});
    }
    SafetensorsPlan plan = plan_safetensors(specs, metadata);
    file.preamble = std::move(plan.preamble);
    file.size = plan.file_size;
    for (std::size_t t = 0; t < plan.order.size(); ++t)
      file.add(*contents[i][plan.order[t]], plan.tensors[t].begin);
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
    for (const ExportPart& part : file.parts) {
      weight_map[part.tensor->name] = file.name;
      total += part.tensor->bytes();
    }
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
  return index.dump(2) + "\n";
}

}  // namespace tessera::io
