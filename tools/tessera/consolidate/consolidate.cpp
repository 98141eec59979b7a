#include "io/consolidate/consolidate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/base/processors.h"
#include "io/base/json.h"
#include "io/consolidate/options.h"
#include "tools/tessera/command.h"
#include "tools/tessera/consolidate/names.h"
#include "tools/tessera/consolidate/plan.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/signal/stop_signal.h"
#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {
namespace {

struct Options {
  std::string source, out;
};

int default_jobs() { return std::clamp(4 * usable_processors(), 4, 16); }

void print_json(const io::ConsolidateReport& report, const std::vector<std::string>& warnings,
                const std::string& out) {
  io::Json json = io::report_json(report);
  json["out"] = out;
  json["warnings"] = warnings;
  fmt::print("{}\n", io::dump_json(json));
}

void print_report(const io::ConsolidateReport& report, const std::string& out,
                  const std::string& part) {
  std::vector<std::pair<std::string, std::string>> rows{
      {"source", report.source.string()},
      {"written",
       fmt::format("{}: {} tensors, {}", out, report.tensors, format_bytes(report.bytes))}};
  if (!report.committed) {
    rows.back().second =
        fmt::format("part {}: {} tensors, {}", part, report.tensors, format_bytes(report.bytes));
    rows.emplace_back("waiting for", report.waiting.empty()
                                         ? "another process, which completes " + out
                                         : fmt::format("part {}", fmt::join(report.waiting, ", ")));
  }
  if (report.parameters > 0) {
    rows.emplace_back("parameters", format_count(static_cast<double>(report.parameters)));
  }
  if (report.reused_bytes > 0) {
    rows.emplace_back("already done", format_bytes(report.reused_bytes));
  }
  const std::string skipped = format_skipped(report.skipped);
  if (!skipped.empty()) rows.emplace_back("skipped", skipped);
  rows.emplace_back("time", format_duration(report.seconds));
  constexpr std::size_t kShown = 20;
  const std::size_t files = report.files.size();
  for (std::size_t i = 0; i < std::min(files, kShown); ++i)
    rows.emplace_back(i == 0 ? "files" : "", report.files[i]);
  if (files > kShown) rows.emplace_back("", fmt::format("and {} more", files - kShown));
  fmt::print("{}", format_rows(detect_console(STDOUT_FILENO), rows));
}

int run(const CLI::App& app, const Options& options) {
  require(!options.source.empty() && !options.out.empty(),
          "CHECKPOINT and OUT must not be empty; is a variable of a script not set?");
  io::OptionTexts given = option_texts(app);
  const bool json = given.flag("json"), dry_run = given.flag("dry-run");
  const auto step = parse_step(options.source, given.text("step", "latest"));
  given.set("step", step ? std::to_string(*step) : "latest");
  if (!given.has("jobs")) given.set("jobs", std::to_string(default_jobs()));
  io::ConsolidateOptions consolidate = io::consolidate_options(given);
  if (dry_run) {
    const auto plan = io::plan_consolidation(options.source, options.out, consolidate);
    fmt::print("{}", json ? io::dump_json(plan_json(plan)) + "\n"
                          : format_plan(plan, detect_console(STDOUT_FILENO)));
    return 0;
  }
  // A stop signal before the first progress call kills the process, because no work is lost yet.
  const HeldWarnings held;
  std::optional<StopSignal> stop;
  std::vector<std::string> warnings;
  consolidate.warn = [&](const std::string& text) {
    warnings.push_back(text);
    fmt::print(stderr, "tessera: warning: {}\n", escaped(text));
  };
  ByteProgress checked("compared with the seal");
  std::optional<ByteProgress> progress;  // timed from its first call
  consolidate.checked = [&](std::int64_t done, std::int64_t total) { checked.update(done, total); };
  consolidate.progress = [&](const io::ConsolidateProgress& at) {
    if (!stop) stop.emplace();
    if (!progress) progress.emplace("written");
    progress->update(at.done, at.total, at.reused);
    return stop->received() == 0;
  };
  try {
    const auto report = io::consolidate(options.source, options.out, consolidate);
    if (json)
      print_json(report, warnings, options.out);
    else
      print_report(report, options.out, given.text("part"));
    return 0;
  } catch (const io::ConsolidationStopped& stopped) {
    progress->stop();
    const int code = stop_exit_code(stop->received());
    fmt::print(stderr, "tessera: {}\n", stopped.what());
    if (json) fmt::print("{}\n", io::dump_json({{"error", stopped.what()}, {"exit_code", code}}));
    return code;
  }
}

}  // namespace

Command add_consolidate(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand(
      "consolidate",
      "Write a checkpoint's shards as a whole model; needs little memory and no GPU.\n"
      "Ctrl-C or a kill leaves OUT.tmp; the same command then continues at the first unfinished "
      "file.");
  app->footer(
      "Examples:\n"
      "  tessera consolidate runs/a model\n"
      "      the newest checkpoint of a run of tessera, for Hugging Face\n"
      "  tessera consolidate step-1000 model --config llama/\n"
      "      a Distributed Checkpoint of PyTorch, with the config.json and tokenizer in llama/\n"
      "  tessera consolidate run/global_step500 model --config llama/ --dtype bf16\n"
      "      DeepSpeed's float32 weights as bf16\n"
      "  tessera consolidate megatron/ model --config llama/ --step 4000\n"
      "      an iteration of Megatron-core\n"
      "  tessera consolidate state.pt merged --config adapter_config.json --merge-lora --base "
      "llama/\n"
      "      LoRA adapters in a training state, merged with their base\n"
      "  tessera consolidate step-1000 gguf --config llama/ --format gguf --dtype q8_0\n"
      "      one file for llama.cpp\n"
      "  tessera consolidate step-1000 resume --config llama/ --format dcp --what all\n"
      "      weights and optimizer, for torch.distributed.checkpoint.load\n"
      "  tessera consolidate step-1000 /shared/model --config llama/ --part 1/4\n"
      "      the first of four machines, which run it with 1/4 to 4/4");
  app->add_option(
         "CHECKPOINT", options->source,
         "A checkpoint, a run (its newest checkpoint), a Hugging Face model directory, a "
         "PyTorch Distributed Checkpoint (FSDP, torchtitan, Lightning), a directory of FSDP's "
         "files per rank (verl, SkyRL, accelerate), a DeepSpeed run or its global_step folder, a "
         "Megatron-core run or its iter folder (torch_dist, also NeMo 2's), a "
         "file of torch.save (.ckpt, .pt, "
         ".pth, .bin), adapters in PEFT's format, or a .gguf file (to hf only)")
      ->required();
  app->add_option("OUT", options->out, "Directory to write")->required();
  add_text(
      *app, "--format",
      "hf: a Hugging Face directory, also of a model that tessera does not know; safetensors: "
      "tensors alone; gguf: model.gguf for llama.cpp and its kin, of Llama, Mistral, Qwen 2 and "
      "3, Gemma 1 to 3, Phi-3, OLMo 2 and GPT-2; dcp: a PyTorch Distributed Checkpoint, from "
      "which torch.distributed.checkpoint.load resumes; bin: a Hugging Face directory with "
      "pytorch_model.bin, and the optimizer's state dict in optimizer.bin. Optimizer state "
      "needs safetensors, dcp or bin")
      ->check(CLI::IsMember({"hf", "safetensors", "gguf", "dcp", "bin"}))
      ->default_str("hf, or safetensors with --tensors or --what optimizer or all");
  add_text(*app, "--what", "Weights, optimizer state, or both")
      ->check(CLI::IsMember({"model", "optimizer", "all"}))
      ->default_str("model");
  add_text(*app, kWeightsOption, kWeightsHelp)
      ->check(CLI::IsMember({"trained", "ema"}))
      ->default_str("trained");
  add_text(*app, "--dtype",
           "Dtype of the weights; f16 is an error if a value is beyond 65504, q8_0 is for gguf")
      ->check(CLI::IsMember({"keep", "f32", "bf16", "f16", "q8_0"}))
      ->default_str("keep");
  add_text(*app, "--max-shard-size", "Maximum size of a file of tensors")->default_str("5GB");
  add_text(*app, "--memory",
           "Total memory of all buffers; tensor metadata adds about 3 KiB per tensor")
      ->default_str("256MiB");
  add_text(*app, "--step", kStepHelp)->default_str("latest");
  add_integer(*app, "--jobs", "Threads that copy")->default_str(std::to_string(default_jobs()));
  add_switch(*app, "--buffered",
             "Use the page cache: slower, but the output stays cached for the next reader");
  add_switch(*app, "--merge-lora",
             "Of LoRA adapters (a run, PEFT's format, or a state of PEFT's running model): write "
             "the weights of their base with them; without it, adapters of a run or a state are "
             "written in PEFT's format");
  add_text(*app, "--base",
           "Model of the adapters' base, if it is not where they say, or in the state");
  add_text(*app, "--config",
           "config.json of the model (any family), or a directory with it, for shards "
           "without one, or adapter_config.json of adapters; the tokenizer and "
           "generation_config.json in the same directory are copied if the shards have none");
  add_text(*app, "--like",
           "Hugging Face directory whose tensors have the names and shapes that the export "
           "must have, for a model that tessera does not know; its config.json is used "
           "without --config");
  add_name_rules(*app);
  add_integer(*app, "--shards",
              "Expected number of PyTorch's shard-*.safetensors, which do not record it")
      ->check(CLI::PositiveNumber);
  add_texts(*app, "--tensors",
            "Export only tensors whose name, after --strip, matches this pattern, such as "
            "'h.0.*', and "
            "their moments, as safetensors (may be repeated)");
  add_text(*app, "--part",
           "K/N: write only the files of part K of N, beside OUT. Run the same command with "
           "each K from 1 to N, on any machines that share OUT's directory; the last one "
           "to finish completes OUT");
  add_switch(*app, "--dry-run",
             "Print the export's sources, names and files, or why it would fail; write nothing");
  add_switch(*app, "--overwrite", "Replace an earlier export at OUT");
  add_switch(*app, "--json", "Machine-readable output");
  return {app, [app, options] { return run(*app, *options); }};
}

}  // namespace tessera::tools
