#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/memory.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/gguf/header.h"
#include "io/hf/lora.h"
#include "io/safetensors/dtype.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"
#include "tools/tessera/command.h"
#include "tools/tessera/consolidate/plan.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {
namespace {

struct InspectCommand {
  std::string path, step = "latest";
  bool json = false, chunks = false;
};

io::Json list(const Shape& shape) { return std::vector<std::int64_t>(shape.begin(), shape.end()); }

io::Json describe_place(const io::Chunk& chunk) {
  io::Json place{{"file", chunk.file},
                 {"bytes", {chunk.byte_begin, chunk.byte_end}},
                 {"elements", {chunk.begin, chunk.end}},
                 {"checksum", io::format_checksum(chunk.crc64)}};
  if (chunk.box)
    place["box"] = {{"offsets", list(chunk.box->offsets)}, {"shape", list(chunk.box->shape)}};
  return place;
}

std::size_t weights_with_state(const io::CheckpointIndex& index) {
  const auto& state = index.optimizer->state;
  return state.empty() ? 0 : state.begin()->second.size();
}

io::Json describe_tensors(const io::TensorMap& tensors, const io::Section& section,
                          bool with_places) {
  io::Json described = io::Json::object();
  for (const auto& [name, tensor] : tensors) {
    io::Json entry{{"section", section.name()},
                   {"dtype", io::safetensors_dtype_name(tensor.dtype)},
                   {"shape", list(tensor.shape)},
                   {"chunks", tensor.chunks.size()}};
    if (const auto crc = io::tensor_checksum(tensor)) {
      entry["checksum"] = io::format_checksum(*crc);
    }
    if (with_places) {
      entry["places"] = io::Json::array();
      for (const io::Chunk& chunk : tensor.chunks) entry["places"].push_back(describe_place(chunk));
    }
    described[name] = std::move(entry);
  }
  return described;
}

// Output of --json: path, step, world_size, run_id, created, tessera, format_version, sections,
// digest, parameters, bytes (of all files except the index), files, model (configuration), tensors
// (model weights by name: section, dtype, shape, number of chunks, checksum), optimizer ({step,
// number of tensors} or null), configuration (of the run, from the trainer section, or null) and
// trainer_problem (error from reading that section, or null).
// @param with_places  also list each tensor's chunks as "places" (file, bytes, elements, checksum,
//   box), and the optimizer's state tensors
io::Json describe_checkpoint(const io::CheckpointReader& reader, bool with_places) {
  const io::CheckpointIndex& index = reader.index();
  std::int64_t parameters = 0, bytes = 0;
  for (const auto& [name, size] : index.files) bytes += size;
  io::Json sections = io::Json::array(), tensors = io::Json::object();
  io::Json optimizer, configuration, problem;
  if (index.model) {
    sections.push_back("model");
    tensors = describe_tensors(*index.model, io::kModelSection, with_places);
    for (const auto& [name, tensor] : *index.model) parameters += numel(tensor.shape);
  }
  if (index.optimizer) {
    sections.push_back("optimizer");
    optimizer = {{"step", index.optimizer->step}, {"tensors", weights_with_state(index)}};
    for (const auto& [state, tensors] : index.optimizer->state)
      if (with_places) optimizer[state] = describe_tensors(tensors, {state}, with_places);
  }
  if (index.trainer) {
    sections.push_back("trainer");
    bytes += index.trainer->size;
    try {
      const std::string source = (reader.path() / index.trainer->file).string();
      const io::Json trainer = io::parse_json(reader.trainer_json(), source);
      if (trainer.is_object() && trainer.contains("config")) configuration = trainer["config"];
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  return {{"path", reader.path().string()},
          {"step", index.step},
          {"world_size", index.world_size},
          {"run_id", index.run_id},
          {"created", index.created},
          {"tessera", index.tessera_version},
          {"format_version", io::kCheckpointVersion},
          {"sections", std::move(sections)},
          {"digest", index.model ? io::Json(reader.digest()) : io::Json(nullptr)},
          {"parameters", parameters},
          {"bytes", bytes},
          {"files", index.files},
          {"model", io::Json::parse(index.model_config)},
          {"tensors", std::move(tensors)},
          {"optimizer", std::move(optimizer)},
          {"configuration", std::move(configuration)},
          {"trainer_problem", std::move(problem)}};
}

void print_tensors(const io::TensorMap& tensors, bool with_chunks) {
  for (const auto& [name, tensor] : tensors) {
    fmt::print("  {:<32} {:<5} {:<16} {}\n", escaped(name), tensor.dtype, tensor.shape.str(),
               counted(std::ssize(tensor.chunks), "chunk"));
    if (!with_chunks) continue;
    for (const io::Chunk& chunk : tensor.chunks) {
      const std::string box =
          chunk.box ? fmt::format(" of the box at {} of {}", chunk.box->offsets, chunk.box->shape)
                    : "";
      fmt::print("    {} bytes {} to {}: elements {} to {}{}, {}\n", escaped(chunk.file),
                 chunk.byte_begin, chunk.byte_end, chunk.begin, chunk.end, box,
                 io::format_checksum(chunk.crc64));
    }
  }
}

void print(const io::CheckpointReader& reader, const io::Json& json, bool with_chunks) {
  const io::CheckpointIndex& index = reader.index();
  std::vector<std::pair<std::string, std::string>> rows{
      {"checkpoint", reader.path().string()},
      {"step", std::to_string(index.step)},
      {"run", index.run_id},
      {"created", fmt::format("{} by tessera {}, format version {}", index.created,
                              index.tessera_version, json["format_version"].get<int>())},
      {"ranks", std::to_string(index.world_size)},
      {"sections",
       fmt::format("{}", fmt::join(json["sections"].get<std::vector<std::string>>(), ", "))},
      {"stored", fmt::format("{} in {}", format_bytes(json["bytes"].get<std::int64_t>()),
                             counted(std::ssize(index.files), "shard"))},
      {"parameters", format_count(json["parameters"].get<double>())},
      {"digest",
       json["digest"].is_string() ? json["digest"].get<std::string>() : "none (no model section)"}};
  if (index.optimizer) {
    std::vector<std::string> names;
    for (const auto& [state, tensors] : index.optimizer->state) names.push_back(state);
    rows.emplace_back("optimizer",
                      fmt::format("{} updates; {} of {} tensors", index.optimizer->step,
                                  fmt::join(names, ", "), weights_with_state(index)));
  }
  rows.emplace_back("model", index.model_config);
  for (const auto& [section, settings] : json["configuration"].items()) {
    if (section == "model" || !settings.is_object()) continue;
    rows.emplace_back(section, settings.dump());
  }
  if (json["trainer_problem"].is_string()) {
    rows.emplace_back("trainer", json["trainer_problem"].get<std::string>());
  }
  fmt::print("{}", format_rows(detect_console(STDOUT_FILENO), rows));
  if (index.model) {
    fmt::print("\n");
    print_tensors(*index.model, with_chunks);
  }
  if (!with_chunks || !index.optimizer) return;
  for (const auto& [state, tensors] : index.optimizer->state) {
    fmt::print("\noptimizer/{}\n", state);
    print_tensors(tensors, true);
  }
}

// The tensors of a GGUF file, also of types that tessera does not read.
io::ConsolidatePlan plan_of_gguf(const io::fs::path& path) {
  const io::GgufHeader header = io::read_gguf_header(io::File::open(path));
  io::ConsolidatePlan plan;
  plan.source = path;
  plan.kind = "GGUF file";
  const auto arch = header.keys.find("general.architecture");
  if (arch != header.keys.end() && arch->is_string())
    plan.kind += fmt::format(" of architecture {}", arch->get<std::string>());
  const std::string file = path.filename().string();
  for (const io::GgufEntry& entry : header.tensors) {
    io::ConsolidatePlan::Tensor& tensor = plan.tensors.emplace_back();
    tensor.source_name = tensor.name = entry.name;
    tensor.file = file;
    tensor.shape = entry.shape;
    tensor.bytes = entry.end - entry.begin;
    tensor.opaque_dtype = entry.elements->name;
  }
  std::error_code error;
  plan.files.push_back({file, static_cast<std::int64_t>(io::fs::file_size(path, error))});
  return plan;
}

io::ConsolidatePlan plan_of_peft(const io::fs::path& path) {
  const auto source = io::open_foreign(path);
  io::ConsolidatePlan plan;
  plan.source = path;
  plan.kind = "LoRA adapters (PEFT)";
  for (const io::TensorInfo& info : source->tensors())
    plan.tensors.push_back({info.name, info.name, "", info.shape, info.dtype, info.dtype,
                            numel(info.shape) * static_cast<std::int64_t>(dtype_size(info.dtype)),
                            "", io::Encoding::Plain});
  return plan;
}

// The tensors of shards, under their own names; of optimizer state if there are no weights.
io::ConsolidatePlan plan_of_shards(const io::fs::path& path) {
  io::ConsolidateOptions consolidate;
  consolidate.format = io::ExportFormat::Safetensors;
  consolidate.names.strip_wrappers = false;
  consolidate.partial = true;
  try {
    return io::plan_consolidation(path, consolidate);
  } catch (const InvalidArgument&) {
    consolidate.what = io::ExportWhat::Optimizer;
    try {
      return io::plan_consolidation(path, consolidate);
    } catch (const Error&) {
    }
    throw;
  }
}

// Prints what another program saved, under its own names.
void print_foreign(const InspectCommand& options) {
  require(options.step == "latest", "{} is not a tessera checkpoint and has no step {}",
          options.path, options.step);
  require(!options.chunks, "{} is not a tessera checkpoint; leave --chunks out", options.path);
  const io::ConsolidatePlan plan = io::is_gguf(options.path) ? plan_of_gguf(options.path)
                                   : io::is_adapter_directory(options.path)
                                       ? plan_of_peft(options.path)
                                       : plan_of_shards(options.path);
  fmt::print("{}", options.json ? io::dump_json(plan_json(plan)) + "\n"
                                : format_plan(plan, detect_console(STDOUT_FILENO), "tensors"));
}

int run_inspect(const InspectCommand& options) {
  if (io::is_foreign(options.path)) {
    print_foreign(options);
    return 0;
  }
  io::refuse_parent_of_shards(options.path);
  const auto reader = io::open_checkpoint(options.path, parse_step(options.path, options.step));
  const io::Json json = describe_checkpoint(reader, options.chunks);
  if (options.json) {
    fmt::print("{}\n", io::dump_json(json));
  } else {
    print(reader, json, options.chunks);
  }
  return 0;
}

}  // namespace

Command add_checkpoint_inspect(CLI::App& parent) {
  const auto options = std::make_shared<InspectCommand>();
  CLI::App* app =
      parent.add_subcommand("inspect",
                            "Print step, sections, tensors, digest, run, ranks, version and "
                            "configuration. Of anything else that consolidate reads: the "
                            "tensors, under their names there");
  app->add_option("PATH", options->path, kAnyCheckpoint)->required();
  app->add_option("--step", options->step, kStepHelp)->capture_default_str();
  app->add_flag("--json", options->json, "Machine-readable output");
  app->add_flag("--chunks", options->chunks,
                "List file, bytes, elements and checksum of each chunk, also of moments");
  return {app, [options] { return run_inspect(*options); }};
}

}  // namespace tessera::tools
