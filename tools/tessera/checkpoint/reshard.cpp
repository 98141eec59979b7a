#include "io/checkpoint/reshard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/base/memory.h"
#include "io/base/json.h"
#include "io/base/size.h"
#include "io/checkpoint/find.h"
#include "io/gguf/header.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"
#include "models/language_model.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/train/checkpoints.h"
#include "train/load_state.h"
#include "train/run_lock.h"

namespace tessera::tools {
namespace {

struct ReshardCommand {
  std::string source, out, step = "latest", memory = "256MiB";
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

// Tensors in the order in which the model registers them; empty for an unknown architecture.
std::vector<io::TensorInfo> known_order(const io::CheckpointIndex& index) {
  try {
    const models::Arch arch = models::parse_arch(index.model_config, "model");
    return train::tensors_of(*models::make_model(arch), arch.lora.has_value());
  } catch (const Error&) {
    return {};
  }
}

// A checkpoint of tessera also has the step, the position in the data and the configuration of a
// run, which other programs' shards lack; and weights alone need no certain number of shards.
void refuse_foreign(const std::string& source) {
  io::refuse_parent_of_shards(source);
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
  require<Unsupported>(
      !io::is_sharded(source),
      "{} is of another program and not a run that tessera could resume. Its weights need no "
      "resharding: any number of ranks starts from them with `tessera train --model.init_from {}` "
      "(config.json in it or next to it), and `tessera consolidate` writes them whole",
      source, source);
}

int run_reshard(const ReshardCommand& options) {
  refuse_foreign(options.source);
  const auto source = io::open_checkpoint(options.source, parse_step(options.source, options.step));
  io::ReshardOptions reshard = options.reshard;
  reshard.memory = io::parse_bytes(options.memory);
  reshard.order = known_order(source.index());
  ByteProgress progress("copied");
  reshard.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const io::fs::path out = checkpoints_of(options.out, source.index().step);
  const comm::FileDescriptor lock = lock_owner(out);
  const io::ReshardReport report = io::reshard_checkpoint(source, out, reshard);
  if (options.json) {
    const io::Json json{{"source", source.path().string()},
                        {"path", report.path.string()},
                        {"step", source.index().step},
                        {"world_size", reshard.world_size},
                        {"digest", report.digest.empty() ? io::Json() : io::Json(report.digest)},
                        {"bytes", report.bytes},
                        {"seconds", report.seconds}};
    fmt::print("{}\n", io::dump_json(json));
    return 0;
  }
  std::vector<std::pair<std::string, std::string>> rows{
      {"source",
       fmt::format("{} ({})", source.path().string(), counted(source.index().world_size, "rank"))},
      {"written", fmt::format("{} ({}): {}", report.path.string(),
                              counted(reshard.world_size, "rank"), format_bytes(report.bytes))}};
  if (!report.digest.empty()) rows.emplace_back("digest", report.digest + ", same as the source");
  rows.emplace_back("time", format_duration(report.seconds));
  fmt::print("{}", format_rows(detect_console(STDOUT_FILENO), rows));
  return 0;
}

}  // namespace

Command add_checkpoint_reshard(CLI::App& parent) {
  const auto options = std::make_shared<ReshardCommand>();
  io::ReshardOptions& reshard = options->reshard;
  reshard.jobs = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 4U));
  CLI::App* app = parent.add_subcommand(
      "reshard",
      "Write a checkpoint as a run with another number of ranks would have saved it. Resuming "
      "does not need this: any run loads any checkpoint");
  app->add_option("SRC", options->source, kOneCheckpoint)->required();
  app->add_option("OUT", options->out,
                  "Run or directory of checkpoints in which to write a checkpoint of the same step")
      ->required();
  app->add_option("--world", reshard.world_size, "Number of ranks, and so of shards")->required();
  app->add_option("--step", options->step, kStepHelp)->capture_default_str();
  app->add_option("--memory", options->memory, "Total memory of all buffers")
      ->capture_default_str();
  app->add_option("--jobs", reshard.jobs, "Threads that copy")->capture_default_str();
  app->add_flag("--overwrite", reshard.overwrite, "Replace a checkpoint of the same step in OUT");
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_reshard(*options); }};
}

}  // namespace tessera::tools
