#include "io/consolidate/sink.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "io/consolidate/bin_files.h"
#include "io/consolidate/dcp_files.h"
#include "io/consolidate/gguf_file.h"
#include "io/torch/archive_writer.h"

namespace tessera::io {
namespace {

void plan_safetensors_sink(ConsolidateSource& source, const ConsolidateOptions& options,
                           ExportLayout& layout) {
  const auto lay_out = [&](const std::vector<ExportTensor>& tensors, const std::string& stem) {
    if (tensors.empty()) return;
    // PEFT reads one file.
    const std::int64_t most =
        source.is_adapter ? std::numeric_limits<std::int64_t>::max() : options.max_shard_size;
    layout.add(plan_tensor_files(tensors, stem, most), stem + ".safetensors");
  };
  lay_out(source.weights, source.is_adapter ? "adapter_model" : "model");
  lay_out(source.optimizer, "optimizer");
}

void plan_gguf_sink(ConsolidateSource& source, const ConsolidateOptions& options,
                    ExportLayout& layout) {
  layout.files.push_back(plan_gguf_file(source, layout.others, options));
  layout.others.clear();
}

bool is_safetensors_name(std::string_view name) {
  return std::ranges::any_of(
      std::array{"model", "optimizer", "adapter_model"},
      [&](const char* stem) { return is_file_of(name, stem, ".safetensors"); });
}
bool is_bin_name(std::string_view name) {
  return is_file_of(name, kBinModel, ".bin") || name == kBinOptimizer;
}
bool is_own_safetensors(const fs::path& file) {
  return file.extension() != ".safetensors" || is_written_by_export(file);
}
bool is_own_bin(const fs::path& file) {
  return file.extension() != ".bin" || is_torch_of_export(file);
}
bool is_own_dcp(const fs::path& file) {
  return file.filename() == kDcpMetadata || is_torch_of_export(file);
}

// In the order of ExportFormat.
constexpr ExportSink kSinks[] = {
    {.name = "hf",
     .needs_config = true,
     .takes_adapters = true,
     .plan = plan_safetensors_sink,
     .is_tensor_file = is_safetensors_name,
     .is_own = is_own_safetensors},
    {.name = "safetensors",
     .has_hf_names = false,
     .has_optimizer = true,
     .takes_adapters = true,
     .plan = plan_safetensors_sink,
     .is_tensor_file = is_safetensors_name,
     .is_own = is_own_safetensors},
    {.name = "gguf",
     .needs_config = true,
     .plan = plan_gguf_sink,
     .is_tensor_file = [](std::string_view name) { return name == kGgufFile; },
     .is_own = is_gguf_of_export},
    {.name = "dcp",
     .has_optimizer = true,
     .plan = plan_dcp_files,
     .is_tensor_file = is_dcp_name,
     .is_own = is_own_dcp},
    {.name = "bin",
     .needs_config = true,
     .has_optimizer = true,
     .plan = plan_bin_files,
     .is_tensor_file = is_bin_name,
     .is_own = is_own_bin},
};

}  // namespace

void ExportLayout::add(std::vector<ExportFile> added, const std::string& whole) {
  if (added.size() > 1) others.push_back({whole + ".index.json", tensor_files_index(added)});
  std::ranges::move(added, std::back_inserter(files));
}

const ExportSink& sink_of(ExportFormat format) { return kSinks[static_cast<std::size_t>(format)]; }

const ExportSink* sink_with_file(std::string_view name) {
  const auto* const found = std::ranges::find_if(
      kSinks, [&](const ExportSink& sink) { return sink.is_tensor_file(name); });
  return found == std::end(kSinks) ? nullptr : found;
}

std::string formats_with_optimizer() {
  std::vector<std::string_view> names;
  for (const ExportSink& sink : kSinks)
    if (sink.has_optimizer) names.push_back(sink.name);
  return fmt::format("{} or {}", fmt::join(std::span(names).first(names.size() - 1), ", "),
                     names.back());
}

}  // namespace tessera::io
