#include "tools/tessera/consolidate/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/memory.h"
#include "io/base/json.h"
#include "io/safetensors/dtype.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {

io::Json plan_json(const io::ConsolidatePlan& plan) {
  io::Json tensors = io::Json::array(), files = io::Json::object(), skipped = io::Json::array();
  std::int64_t bytes = 0;
  for (const auto& tensor : plan.tensors) {
    const auto name_of = [&](DType dtype) {
      return tensor.opaque_dtype.empty() ? std::string(io::safetensors_dtype_name(dtype))
                                         : tensor.opaque_dtype;
    };
    tensors.push_back(
        {{"source", tensor.source_name},
         {"name", tensor.name},
         {"dtype", name_of(tensor.stored)},
         {"written", tensor.encoding == io::Encoding::Q8_0 ? "Q8_0" : name_of(tensor.written)},
         {"shape", std::vector<std::int64_t>(tensor.shape.begin(), tensor.shape.end())},
         {"bytes", tensor.bytes},
         {"file", tensor.file}});
    bytes += tensor.bytes;
  }
  for (const auto& file : plan.files) files[file.name] = file.bytes;
  for (const auto& entry : plan.skipped) {
    skipped.push_back({{"name", entry.name}, {"why", entry.why}});
  }
  return {{"source", plan.source.string()}, {"kind", plan.kind},
          {"tensors", std::move(tensors)},  {"files", std::move(files)},
          {"skipped", std::move(skipped)},  {"bytes", bytes},
          {"warnings", plan.warnings}};
}

std::string format_skipped(const std::vector<io::SkippedEntry>& skipped) {
  std::map<std::string, int> reasons;
  for (const auto& entry : skipped) ++reasons[entry.why];
  std::string text;
  for (const auto& [why, n] : reasons) {
    text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", n, why);
  }
  return text;
}

namespace {

/// Names of skipped weights, which may have been meant to be part of the model.
std::string format_skipped_weights(const std::vector<io::SkippedEntry>& skipped) {
  constexpr int kShown = 20;
  std::string text;
  int weights = 0;
  for (const auto& [name, why] : skipped) {
    if (why == "not a tensor" || why.starts_with("optimizer state")) continue;
    if (weights++ == 0) text += "\n  skipped\n";
    if (weights <= kShown) text += fmt::format("    {}  ({})\n", escaped(name), why);
  }
  if (weights > kShown)
    text += fmt::format("    and {} more; --json lists all\n", weights - kShown);
  return text;
}

}  // namespace

std::string format_plan(const io::ConsolidatePlan& plan, const ConsoleStyle& style,
                        const std::string& label) {
  std::int64_t bytes = 0;
  std::size_t width = 8;
  for (const auto& tensor : plan.tensors) {
    bytes += tensor.bytes;
    width = std::max(width, escaped(tensor.name).size());
  }
  std::vector<std::pair<std::string, std::string>> rows{
      {"source", escaped(plan.source.string())},
      {"kind", escaped(plan.kind)},
      {label, fmt::format("{} tensors, {}", plan.tensors.size(), format_bytes(bytes))}};
  const std::string skipped = format_skipped(plan.skipped);
  if (!skipped.empty()) rows.emplace_back("skipped", skipped);
  for (const std::string& warning : plan.warnings) rows.emplace_back("warning", escaped(warning));
  std::string text = format_rows(style, rows);
  std::string file;
  for (const auto& tensor : plan.tensors) {
    if (tensor.file != file) {
      file = tensor.file;
      const auto found = std::find_if(plan.files.begin(), plan.files.end(),
                                      [&](const auto& each) { return each.name == file; });
      text += fmt::format("\n  {} ({})\n", escaped(file),
                          format_bytes(found == plan.files.end() ? 0 : found->bytes));
    }
    const bool encoded = tensor.encoding == io::Encoding::Q8_0;
    const std::string dtype = !tensor.opaque_dtype.empty() ? tensor.opaque_dtype
                              : encoded ? fmt::format("{} -> q8_0", tensor.stored)
                              : tensor.stored == tensor.written
                                  ? fmt::format("{}", tensor.stored)
                                  : fmt::format("{} -> {}", tensor.stored, tensor.written);
    text += fmt::format("    {:<{}}  {:<12}  {:<16}  {:>10}{}\n", escaped(tensor.name), width,
                        dtype, tensor.shape.str(), format_bytes(tensor.bytes),
                        tensor.source_name == tensor.name
                            ? ""
                            : paint(style, Tone::Dim, "  from " + escaped(tensor.source_name)));
  }
  return text + format_skipped_weights(plan.skipped);
}

}  // namespace tessera::tools
