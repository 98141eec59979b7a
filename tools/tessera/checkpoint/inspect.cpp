#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/memory.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/source/open_sharded.h"
#include "tools/tessera/checkpoint/describe.h"
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
      {"sections", fmt::format("{}", fmt::join(section_names(index), ", "))},
      {"stored", fmt::format("{} in {}", format_bytes(stored_bytes(index)),
                             counted(std::ssize(index.files), "shard"))},
      {"parameters", format_count(static_cast<double>(parameter_count(index)))},
      {"digest",
       json["digest"].is_string() ? json["digest"].get<std::string>() : "none (no model section)"}};
  if (index.optimizer) {
    rows.emplace_back("optimizer",
                      fmt::format("{} updates; moments of {} tensors", index.optimizer->step,
                                  index.optimizer->exp_avg.size()));
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
  for (const io::Section section : {io::Section::ExpAvg, io::Section::ExpAvgSq}) {
    fmt::print("\n{}\n", io::section_name(section));
    print_tensors(*index.tensors(section), true);
  }
}

// Shards of another program, in the form that consolidate would export.
void print_sharded(const InspectCommand& options) {
  require(options.step == "latest", "{} is not a tessera checkpoint and has no step {}",
          options.path, options.step);
  require(!options.chunks, "{} is not a tessera checkpoint; leave --chunks out", options.path);
  io::ConsolidateOptions consolidate;
  consolidate.format = io::ExportFormat::Safetensors;
  const io::ConsolidatePlan plan = io::plan_consolidation(options.path, consolidate);
  fmt::print("{}", options.json ? io::dump_json(plan_json(plan)) + "\n"
                                : format_plan(plan, detect_console(STDOUT_FILENO), "weights"));
}

int run_inspect(const InspectCommand& options) {
  if (io::is_sharded(options.path)) {
    print_sharded(options);
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
  CLI::App* app = parent.add_subcommand(
      "inspect",
      "Print step, sections, tensors, digest, run, ranks, version and configuration. For PyTorch's "
      "shards: the tensors as consolidate would write them");
  app->add_option("PATH", options->path, kOneCheckpoint)->required();
  app->add_option("--step", options->step, kStepHelp)->capture_default_str();
  app->add_flag("--json", options->json, "Machine-readable output");
  app->add_flag("--chunks", options->chunks,
                "List file, bytes, elements and checksum of each chunk, also of moments");
  return {app, [options] { return run_inspect(*options); }};
}

}  // namespace tessera::tools
