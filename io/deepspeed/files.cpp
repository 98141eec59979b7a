#include "io/deepspeed/files.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr const char* kLatest = "latest";
constexpr std::string_view kFolder = "global_step";  // and the step, unless the program names it
constexpr std::int64_t kMaxLatest = 4096;            // bytes
constexpr const char* kConvert =
    "DeepSpeed's ds_to_universal (python -m deepspeed.checkpoint.ds_to_universal) writes each "
    "parameter whole, as zero/NAME/fp32.pt";

bool skip(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

std::optional<int> read_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || number < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

enum class Kind { None, Model, Optimizer, Layer, Expert };

/// A file by its name: "[bf16_]zero_pp_rank_3_mp_rank_00_optim_states.pt".
struct StateFile {
  Kind kind = Kind::None;
  std::string_view prefix;  // "bf16_"
  int rank = 0;             // of the ranks that share an optimizer
  int model_rank = 0;       // of those that share a layer or the layers
  bool parted = false;      // has a rank
};

StateFile parse_name(std::string_view name) {
  const std::string_view whole = name;
  StateFile file;
  constexpr std::string_view kModelEnd = "_model_states.pt", kOptimizerEnd = "_optim_states.pt";
  const bool model = name.ends_with(kModelEnd);
  if (!model && !name.ends_with(kOptimizerEnd)) {
    if (skip(name, "layer_") && name.ends_with("-model_states.pt")) file.kind = Kind::Layer;
    return file;
  }
  name.remove_suffix(model ? kModelEnd.size() : kOptimizerEnd.size());
  if (skip(name, "layer_") || skip(name, "expert_") || skip(name, "expp_rank_")) {
    file.kind = whole.find("exp") != std::string_view::npos ? Kind::Expert : Kind::Layer;
    return file;
  }
  for (const std::string_view prefix : {"bf16_", "fp16_"})
    if (skip(name, prefix)) file.prefix = prefix;
  if (skip(name, "zero_pp_rank_")) {
    const auto rank = read_number(name);
    if (!rank || !skip(name, "_")) return {};
    file.rank = *rank;
    file.parted = true;
  }
  if (!skip(name, "mp_rank_")) return {};
  const auto model_rank = read_number(name);
  if (!model_rank || (!model && !file.parted)) return {};
  file.model_rank = *model_rank;
  if (skip(name, "_")) file.kind = Kind::Layer;  // "mp_rank_00_001": and a stage of a pipeline
  if (file.kind == Kind::None && !name.empty()) return {};
  if (file.kind == Kind::None) file.kind = model ? Kind::Model : Kind::Optimizer;
  return file;
}

std::vector<std::string> names_in(const fs::path& dir) {
  std::error_code ignored;
  std::vector<std::string> names;
  for (const fs::path& path : list_directory(dir, ignored))
    names.push_back(path.filename().string());
  return names;
}

bool is_checkpoint(const fs::path& dir) {
  return std::ranges::any_of(
      names_in(dir), [](const std::string& name) { return parse_name(name).kind != Kind::None; });
}

// Names of the checkpoints of a run with their usual names.
std::vector<std::string> checkpoints_in(const fs::path& run) {
  std::vector<std::string> names = names_in(run);
  std::erase_if(names, [&](const std::string& name) {
    return !name.starts_with(kFolder) || !is_checkpoint(run / name);
  });
  return names;
}

// The text of `latest`, without white space at its end. @throws as read_file
std::string read_latest(const fs::path& run) {
  std::string text = read_file(run / kLatest, kMaxLatest);
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

// A part of a path that stays below it.
bool is_folder_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.size() < 256 &&
         name.find_first_of(std::string_view("/\\\n\0", 4)) == std::string_view::npos;
}

std::string folder_of(const fs::path& run) {
  const std::vector<std::string> found = checkpoints_in(run);
  const std::string advice =
      found.empty() ? "" : fmt::format("; give one of its checkpoints: {}", fmt::join(found, ", "));
  require(is_there(run / kLatest),
          "{} has DeepSpeed checkpoints, but no `latest`, which DeepSpeed writes after each save{}",
          run.string(), advice);
  std::string name = read_latest(run);
  require<CorruptCheckpoint>(is_folder_name(name), "{} does not hold the name of a checkpoint{}",
                             (run / kLatest).string(), advice);
  require<CorruptCheckpoint>(is_checkpoint(run / name),
                             "{} names {}, which is not there or holds no files of DeepSpeed{}",
                             (run / kLatest).string(), name, advice);
  return name;
}

}  // namespace

bool is_deepspeed(const fs::path& dir) {
  if (is_checkpoint(dir)) return true;
  if (is_there(dir / kLatest)) {
    try {
      const std::string name = read_latest(dir);
      if (name.starts_with(kFolder) || (is_folder_name(name) && is_checkpoint(dir / name)))
        return true;
    } catch (const Error&) {  // another program's, unless there are checkpoints
    }
  }
  return !checkpoints_in(dir).empty();
}

DeepSpeedFiles find_deepspeed(const fs::path& dir) {
  DeepSpeedFiles files;
  std::string folder;
  if (is_checkpoint(dir)) {
    // A link to a folder of a run stays one: `latest` and config.json are next to it.
    fs::path full = dir.has_filename() ? dir : dir.parent_path();
    if (full.filename() == "." || full.filename() == "..") full = fs::canonical(full);
    files.run = full.has_parent_path() ? full.parent_path() : fs::path(".");
    folder = full.filename().string();
  } else {
    files.run = dir;
    folder = folder_of(dir);
  }
  const fs::path path = files.run / folder;
  require<Unsupported>(
      !is_there(path / "zero"),
      "{} is a universal checkpoint of DeepSpeed, which tessera does not read; give "
      "the one that it was made from, or torch.load its parameters, which are whole "
      "(zero/NAME/fp32.pt)",
      path.string());
  std::map<int, std::string> models, optimizers;  // by rank
  std::string first;                              // name of the first in `optimizers`
  for (const std::string& name : names_in(path)) {
    const StateFile file = parse_name(name);
    if (file.kind == Kind::None) continue;
    require<Unsupported>(file.kind != Kind::Layer,
                         "{} is a DeepSpeed checkpoint of a pipeline ({}), whose layers tessera "
                         "does not join; {}",
                         path.string(), name, kConvert);
    require<Unsupported>(file.kind != Kind::Expert,
                         "{} is a DeepSpeed checkpoint with experts spread over ranks ({}), which "
                         "tessera does not join; {}",
                         path.string(), name, kConvert);
    require<Unsupported>(
        file.model_rank == 0,
        "{} is a DeepSpeed checkpoint of a model whose tensors are split by tensor "
        "parallelism ({}), which tessera does not join; {}",
        path.string(), name, kConvert);
    std::string& of_rank = (file.kind == Kind::Model ? models : optimizers)[file.rank];
    if (file.kind == Kind::Optimizer && first.empty()) first = name;
    const bool is_one = file.kind == Kind::Model || parse_name(first).prefix == file.prefix;
    require<CorruptCheckpoint>(of_rank.empty() && is_one,
                               "{} has {} and {}, which are of different saves into one folder",
                               path.string(), of_rank.empty() ? first : of_rank, name);
    of_rank = fmt::format("{}/{}", folder, name);
  }
  const auto collect = [&](const std::map<int, std::string>& from, std::vector<std::string>& to) {
    for (const auto& [rank, name] : from) {
      require<CorruptCheckpoint>(rank == std::ssize(to),
                                 "{} has {}, but no file like it of rank {}: it is missing, or the "
                                 "save was not finished",
                                 files.run.string(), name, to.size());
      to.push_back(name);
    }
  };
  collect(models, files.models);
  collect(optimizers, files.optimizers);
  require<CorruptCheckpoint>(
      !files.models.empty(),
      "{} has no model states (mp_rank_00_model_states.pt, or with ZeRO-3 "
      "zero_pp_rank_0_mp_rank_00_model_states.pt): the save was not finished",
      path.string());
  return files;
}

}  // namespace tessera::io
