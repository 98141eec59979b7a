#include "io/checkpoint/reshard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "core/base/memory.h"
#include "core/base/processors.h"
#include "io/base/json.h"
#include "io/base/size.h"
#include "io/checkpoint/find.h"
#include "io/gguf/header.h"
#include "io/hf/model_source.h"
#include "io/hf/training_source.h"
#include "io/megatron/files.h"
#include "io/seal/seal.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"
#include "models/language_model.h"
#include "tools/tessera/command.h"
#include "tools/tessera/consolidate/plan.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/train/checkpoints.h"
#include "train/load_state.h"
#include "train/run_lock.h"

namespace tessera::tools {
namespace {

struct ReshardCommand {
  std::string source, out, config, what = "all", step = "latest", memory = "256MiB";
  io::ReshardOptions reshard;
  bool json = false;
};

// Locks the run that owns `checkpoints`, so that no training starts while a checkpoint is written.
comm::FileDescriptor lock_owner(const io::fs::path& checkpoints) {
  const io::fs::path run = checkpoints.parent_path();
  if (checkpoints.filename() != "checkpoints") return {};
  comm::FileDescriptor lock(::open((run / ".lock").c_str(), O_RDWR | O_CLOEXEC));
  if (lock) train::lock_run(lock, run, "by a run ({}); choose another directory or stop it");
  return lock;
}

// Resolves OUT to the checkpoints/ folder if it is a run, else to the directory itself.
io::fs::path checkpoints_of(const std::string& out, std::int64_t step) {
  io::fs::path path = io::fs::absolute(io::fs::path(out) / "").lexically_normal().parent_path();
  std::error_code error;
  if (path.filename() == io::checkpoint_name(step)) return path.parent_path();
  require(
      !io::fs::exists(path / "index.json", error) && !path.filename().string().starts_with("step-"),
      "{} is a checkpoint of another step than {}, or has the name of one; OUT must be a run or a "
      "directory of checkpoints, in which {} is made",
      out, step, io::checkpoint_name(step));
  if (io::fs::is_directory(path / "checkpoints", error)) path /= "checkpoints";
  return path;
}

// A run would go on from a checkpoint in its directory, which imports of other programs' do not
// allow.
void require_no_run(const io::fs::path& checkpoints) {
  const io::fs::path run =
      checkpoints.filename() == "checkpoints" ? checkpoints.parent_path() : checkpoints;
  for (const char* name : {"config.json", "metrics.jsonl", ".lock"})
    require(!io::is_there(run / name),
            "{} is of a run ({}), which cannot go on from checkpoints of other programs; choose "
            "another directory",
            run.string(), name);
  if (!io::is_there(checkpoints)) return;
  for (const io::StepItem& item : io::find_checkpoints(checkpoints)) {
    bool is_import = false;
    try {
      is_import =
          io::CheckpointReader::open(item.path).index().run_id == io::ReshardSource::kImport;
    } catch (const CorruptCheckpoint&) {
    }
    require(is_import,
            "{} holds {}, which is damaged or of a run; checkpoints of other programs are written "
            "to a directory of their own",
            checkpoints.string(), item.path.filename().string());
  }
}

// Tensors in the order in which the model registers them; empty for an unknown architecture.
std::vector<io::TensorInfo> known_order(const io::CheckpointIndex& index) {
  try {
    const models::Arch arch = models::parse_arch(index.model_config, "model");
    return train::tensors_of(*models::make_model(arch), arch.lora.has_value());
  } catch (const Error&) {
    return {};
  }
}

// Throws if the source is not sharded, and says how a run starts from it.
void refuse_unsharded(const std::string& source) {
  require<Unsupported>(
      !io::is_gguf(source),
      "{} is a GGUF file, which is not sharded; `tessera consolidate` writes it as "
      "a Hugging Face directory, from which `tessera train --model.init_from` "
      "starts on any number of ranks",
      source);
  require<Unsupported>(
      !io::is_adapter_directory(source),
      "{} holds LoRA adapters, which are not sharded; any number of ranks continues them with "
      "`tessera train --model.init_from BASE --lora.init_from {}`",
      source, source);
}

// config.json of the model; empty if there is none. @param given  --config
std::optional<io::fs::path> config_of(const io::ShardedSource& source, const std::string& given) {
  std::error_code error;
  io::fs::path path = given.empty() ? source.config_dir() : io::fs::path(given);
  if (io::fs::is_directory(path, error)) path /= "config.json";
  return given.empty() && !io::is_there(path) ? std::nullopt : std::optional(path);
}

struct Source {
  std::optional<io::CheckpointReader> reader;  // or
  io::TrainingSource foreign;
  std::optional<io::ReshardSource> opened;
  std::string kind;
};

Source open_source(const ReshardCommand& options) {
  refuse_unsharded(options.source);
  io::require_model_directory(options.source);
  Source result;
  const auto step = parse_step(options.source, options.step);
  const bool has_steps = step && io::is_megatron_run(options.source);
  auto sharded =
      has_steps ? io::open_megatron(options.source, step) : io::open_sharded(options.source);
  if (!sharded) {
    result.reader = io::open_checkpoint(options.source, step);
    result.kind = counted(result.reader->index().world_size, "rank");
    result.opened.emplace(*result.reader);
    return result;
  }
  require(!step || has_steps, "{} is a {} and has no step {}", options.source, sharded->kind(),
          step.value_or(0));
  result.kind = sharded->kind();
  const io::fs::path path = sharded->where();
  ByteProgress checked("compared with its seal");
  io::require_seal_intact(
      has_steps ? path : io::fs::path(options.source),
      {.threads = options.reshard.jobs,
       .progress = [&](std::int64_t done, std::int64_t total) { checked.update(done, total); }});
  const auto config = config_of(*sharded, options.config);
  result.foreign = io::open_training_source(std::move(sharded), config, options.what == "all");
  std::map<io::Section, const io::TensorSource*> tensors;
  for (const auto& [section, source] : result.foreign.tensors) tensors[section] = source.get();
  result.opened.emplace(path, result.foreign.model_config, result.foreign.step.value_or(0),
                        tensors);
  return result;
}

int run_reshard(const ReshardCommand& options) {
  require(!options.out.empty(), "OUT must not be empty; is a variable of a script not set?");
  const Source opened = open_source(options);
  const io::ReshardSource& source = *opened.opened;
  require(!opened.reader || options.config.empty(),
          "{} is a checkpoint of tessera, which records its model; omit --config", options.source);
  require(!opened.reader || options.what == "all",
          "{} is a checkpoint of tessera, which is resharded whole; omit --what", options.source);
  for (const std::string& warning : opened.foreign.warnings)
    fmt::print(stderr, "tessera: warning: {}\n", escaped(warning));
  io::ReshardOptions reshard = options.reshard;
  reshard.memory = io::parse_bytes(options.memory);
  reshard.order = known_order(source.index);
  ByteProgress progress("copied");
  reshard.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const io::fs::path out = checkpoints_of(options.out, source.index.step);
  if (source.index.run_id == io::ReshardSource::kImport) require_no_run(out);
  const comm::FileDescriptor lock = lock_owner(out);
  const io::ReshardReport report = io::reshard_checkpoint(source, out, reshard);
  if (options.json) {
    const io::Json json{{"source", source.path.string()},
                        {"path", report.path.string()},
                        {"step", source.index.step},
                        {"world_size", reshard.world_size},
                        {"digest", report.digest.empty() ? io::Json() : io::Json(report.digest)},
                        {"bytes", report.bytes},
                        {"seconds", report.seconds},
                        {"skipped", opened.foreign.skipped.size()},
                        {"warnings", opened.foreign.warnings}};
    fmt::print("{}\n", io::dump_json(json));
    return 0;
  }
  std::vector<std::pair<std::string, std::string>> rows{
      {"source", fmt::format("{} ({})", source.path.string(), opened.kind)},
      {"written", fmt::format("{} ({}): {}", report.path.string(),
                              counted(reshard.world_size, "rank"), format_bytes(report.bytes))}};
  if (!report.digest.empty())
    rows.emplace_back("digest", report.digest + (opened.reader ? ", same as the source" : ""));
  std::vector<io::SkippedEntry> skipped;
  for (const auto& [name, why] : opened.foreign.skipped) skipped.push_back({name, why});
  if (!skipped.empty()) rows.emplace_back("skipped", format_skipped(skipped));
  rows.emplace_back("time", format_duration(report.seconds));
  fmt::print("{}", format_rows(detect_console(STDOUT_FILENO), rows));
  return 0;
}

}  // namespace

Command add_checkpoint_reshard(CLI::App& parent) {
  const auto options = std::make_shared<ReshardCommand>();
  io::ReshardOptions& reshard = options->reshard;
  reshard.jobs = std::min(usable_processors(), 4);
  CLI::App* app = parent.add_subcommand(
      "reshard",
      "Write a checkpoint as a run with another number of ranks would have saved it, also from "
      "other programs' shards. Resuming does not need this: any run loads any checkpoint");
  app->add_option("SRC", options->source,
                  "A checkpoint, a run (its newest checkpoint), or other programs' shards: weights "
                  "and optimizer state")
      ->required();
  app->add_option("OUT", options->out,
                  "Run or directory of checkpoints in which to write a checkpoint of the same step")
      ->required();
  app->add_option("--world", reshard.world_size, "Number of ranks, and so of shards")->required();
  app->add_option("--step", options->step, kStepHelp)->capture_default_str();
  app->add_option("--config", options->config,
                  "config.json of the model, or a directory with it, for other programs' shards "
                  "without one; without any, tensors keep their names");
  app->add_option("--what", options->what,
                  "Of other programs' shards: all, or the weights alone (model)")
      ->check(CLI::IsMember({"model", "all"}))
      ->capture_default_str();
  app->add_option("--memory", options->memory, "Total memory of all buffers")
      ->capture_default_str();
  app->add_option("--jobs", reshard.jobs, "Threads that copy")->capture_default_str();
  app->add_flag("--overwrite", reshard.overwrite, "Replace a checkpoint of the same step in OUT");
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_reshard(*options); }};
}

}  // namespace tessera::tools
