#include "io/consolidate/options.h"

#include <charconv>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace tessera::io {

ExportShare parse_share(const std::string& text) {
  ExportShare part;
  const char *const begin = text.data(), *const end = begin + text.size();
  const auto number = std::from_chars(begin, end, part.number);
  const bool has_count = number.ec == std::errc() && number.ptr != end && *number.ptr == '/';
  const auto count = std::from_chars(has_count ? number.ptr + 1 : end, end, part.count);
  require(has_count && count.ec == std::errc() && count.ptr == end && part.number >= 1 &&
              part.number <= part.count,
          "--part is \"{}\"; expected K/N, such as 1/4, with K from 1 to N", text);
  return part;
}

NameRules name_rules(const OptionTexts& given) {
  NameRules rules;
  rules.renames = given.texts("rename");
  rules.select = given.texts("select");
  rules.exclude = given.texts("exclude");
  const std::vector<std::string> strip = given.texts("strip");
  for (const std::string& text : strip)
    require(strip.size() == 1 || (text != "auto" && text != "none"),
            "--strip {} cannot be combined with prefixes, which are removed in the given order",
            text);
  if (strip.empty() || strip[0] == "auto") return rules;
  rules.strip_wrappers = false;
  if (strip[0] != "none") rules.prefixes = strip;
  return rules;
}

std::optional<fs::path> config_file(const OptionTexts& given) {
  const fs::path path = given.text("config");
  if (path.empty()) return std::nullopt;
  std::error_code ignored;
  return fs::is_directory(path, ignored) ? path / "config.json" : path;
}

std::optional<fs::path> like_directory(const OptionTexts& given) {
  const fs::path path = given.text("like");
  return path.empty() ? std::nullopt : std::optional(path);
}

ConsolidateOptions consolidate_options(const OptionTexts& given) {
  ConsolidateOptions options;
  options.tensors = given.texts("tensors");
  options.what = given
                     .choice<ExportWhat>("what", {{"model", ExportWhat::Model},
                                                  {"optimizer", ExportWhat::Optimizer},
                                                  {"all", ExportWhat::All}})
                     .value_or(ExportWhat::Model);
  options.weights = given
                        .choice<WeightKind>("weights", {{"trained", WeightKind::Trained},
                                                        {"ema", WeightKind::Average}})
                        .value_or(WeightKind::Trained);
  const bool is_part_of_model = options.what != ExportWhat::Model || !options.tensors.empty();
  options.format = given
                       .choice<ExportFormat>("format", {{"hf", ExportFormat::HF},
                                                        {"safetensors", ExportFormat::Safetensors},
                                                        {"gguf", ExportFormat::GGUF},
                                                        {"dcp", ExportFormat::DCP},
                                                        {"bin", ExportFormat::Bin}})
                       .value_or(is_part_of_model ? ExportFormat::Safetensors : ExportFormat::HF);
  using Elements = std::pair<std::optional<DType>, Encoding>;
  const Elements as_stored{std::nullopt, Encoding::Plain};
  std::tie(options.dtype, options.encoding) =
      given
          .choice<Elements>("dtype", {{"keep", as_stored},
                                      {"f32", {DType::F32, Encoding::Plain}},
                                      {"bf16", {DType::BF16, Encoding::Plain}},
                                      {"f16", {DType::F16, Encoding::Plain}},
                                      {"q8_0", {std::nullopt, Encoding::Q8_0}}})
          .value_or(as_stored);
  options.max_shard_size = given.bytes("max-shard-size").value_or(options.max_shard_size);
  options.memory = given.bytes("memory").value_or(options.memory);
  options.step = given.step();
  options.jobs = given.jobs();
  options.overwrite = given.flag("overwrite");
  options.direct_io = !given.flag("buffered");
  if (const std::string* part = given.find("part"); part != nullptr && !part->empty())
    options.part = parse_share(*part);
  options.merge_lora = given.flag("merge-lora");
  options.base = given.text("base");
  options.shards = given.integer("shards", 1);
  options.names = name_rules(given);
  options.config_file = config_file(given);
  options.like = like_directory(given);
  given.refuse_others();
  return options;
}

Json report_json(const ConsolidateReport& report) {
  Json json{{"source", report.source.string()},
            {"kind", report.kind},
            {"step", nullptr},
            {"committed", report.committed},
            {"waiting", report.waiting},
            {"files", report.files},
            {"tensors", report.tensors},
            {"parameters", report.parameters},
            {"bytes", report.bytes},
            {"reused_bytes", report.reused_bytes},
            {"skipped", report.skipped.size()},
            {"seconds", report.seconds}};
  if (report.step) json["step"] = *report.step;
  return json;
}

}  // namespace tessera::io
