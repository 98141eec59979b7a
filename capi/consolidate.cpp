#include "io/consolidate/consolidate.h"

#include <nlohmann/json.hpp>

#include "capi/call.h"
#include "core/base/error.h"
#include "io/base/size.h"

namespace tessera::capi {
namespace {

io::NameRules name_rules(const Options& given) {
  io::NameRules rules;
  const std::vector<std::string> strip = given.texts("strip");
  for (const std::string& text : strip)
    require(strip.size() == 1 || (text != "auto" && text != "none"),
            "strip {} cannot be combined with prefixes", text);
  if (!strip.empty() && strip[0] != "auto") {
    rules.strip_wrappers = false;
    if (strip[0] != "none") rules.prefixes = strip;
  }
  rules.renames = given.texts("rename");
  rules.select = given.texts("select");
  rules.exclude = given.texts("exclude");
  return rules;
}

io::ConsolidateOptions consolidate_options(const Options& given) {
  using io::ExportFormat;
  using io::ExportWhat;
  io::ConsolidateOptions options;
  options.tensors = given.texts("tensors");
  options.what = given
                     .choice<ExportWhat>("what", {{"model", ExportWhat::Model},
                                                  {"optimizer", ExportWhat::Optimizer},
                                                  {"all", ExportWhat::All}})
                     .value_or(ExportWhat::Model);
  const bool part = options.what != ExportWhat::Model || !options.tensors.empty();
  options.format = given
                       .choice<ExportFormat>("format", {{"hf", ExportFormat::HF},
                                                        {"safetensors", ExportFormat::Safetensors},
                                                        {"gguf", ExportFormat::GGUF},
                                                        {"dcp", ExportFormat::DCP},
                                                        {"bin", ExportFormat::Bin}})
                       .value_or(part ? ExportFormat::Safetensors : ExportFormat::HF);
  const auto dtype = given.choice<std::string>(
      "dtype", {{"keep", ""}, {"f32", "f32"}, {"bf16", "bf16"}, {"f16", "f16"}, {"q8_0", "q8_0"}});
  if (dtype == "f32") options.dtype = DType::F32;
  if (dtype == "bf16") options.dtype = DType::BF16;
  if (dtype == "f16") options.dtype = DType::F16;
  if (dtype == "q8_0") options.encoding = io::Encoding::Q8_0;
  if (const auto* size = given.find("max-shard-size"))
    options.max_shard_size = io::parse_bytes(*size);
  if (const auto* size = given.find("memory")) options.memory = io::parse_bytes(*size);
  options.step = given.step();
  options.jobs = given.jobs();
  options.overwrite = given.flag("overwrite");
  options.direct_io = !given.flag("buffered");
  options.merge_lora = given.flag("merge-lora");
  options.base = given.text("base", "");
  options.shards = given.integer("shards", 1);
  options.names = name_rules(given);
  if (const auto* like = given.find("like")) options.like = *like;
  if (const auto* config = given.find("config")) {
    options.config_file = *config;
    std::error_code ignored;
    if (io::fs::is_directory(*config, ignored)) *options.config_file /= "config.json";
  }
  return options;
}

}  // namespace
}  // namespace tessera::capi

int tessera_consolidate(const char* source, const char* out, const tessera_option* options,
                        size_t option_count, tessera_progress progress, tessera_text warn,
                        tessera_text report, void* user) {
  namespace io = tessera::io;
  return tessera::capi::run_call({source == nullptr ? "" : source, ""}, [&] {
    constexpr const char* kNames[] = {
        "format",   "what", "dtype",     "max-shard-size", "memory", "step", "jobs",
        "buffered", "base", "overwrite", "merge-lora",     "config", "like", "shards"};
    constexpr const char* kRepeated[] = {"strip", "rename", "select", "exclude", "tensors"};
    auto consolidate = tessera::capi::consolidate_options(
        tessera::capi::Options(options, option_count, kNames, kRepeated));
    if (progress != nullptr) {
      consolidate.progress = [&](const io::ConsolidateProgress& at) {
        return progress(user, at.done, at.total) == 0;
      };
      consolidate.checked = [&](std::int64_t done, std::int64_t total) {
        if (progress(user, done, total) != 0)
          throw tessera::capi::Stopped("the check of the seal was stopped");
      };
    }
    if (warn != nullptr)
      consolidate.warn = [&](const std::string& text) { warn(user, text.c_str()); };
    const std::string from = tessera::capi::text_argument(source, "the source");
    const std::string to = tessera::capi::text_argument(out, "the directory to write");
    const io::ConsolidateReport done = [&] {
      try {
        return io::consolidate(from, to, consolidate);
      } catch (const io::ConsolidationStopped& stopped) {
        throw tessera::capi::Stopped(stopped.what());
      }
    }();
    io::Json json{{"source", done.source.string()},
                  {"kind", done.kind},
                  {"step", nullptr},
                  {"files", done.files},
                  {"tensors", done.tensors},
                  {"parameters", done.parameters},
                  {"bytes", done.bytes},
                  {"reused_bytes", done.reused_bytes},
                  {"skipped", done.skipped.size()},
                  {"seconds", done.seconds}};
    if (done.step) json["step"] = *done.step;
    tessera::capi::send_json(report, user, json);
  });
}
