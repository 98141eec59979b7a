#include "io/source/find_sharded.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <system_error>
#include <tuple>

#include "core/base/error.h"
#include "io/dcp/dcp_source.h"
#include "io/deepspeed/files.h"
#include "io/gguf/header.h"
#include "io/gguf/source.h"
#include "io/hf/lora.h"
#include "io/megatron/files.h"
#include "io/safetensors/directory.h"
#include "io/source/open_sharded.h"
#include "io/torch/rank_files.h"

namespace tessera::io {
namespace {

constexpr int kMaxLevels = 3;
constexpr int kMaxDirectories = 10'000;

// The number after the last `word` in a name, and '-', '_' or '='.
std::optional<std::int64_t> number_after(std::string_view name, std::string_view word) {
  std::optional<std::int64_t> found;
  for (std::size_t at = 0; (at = name.find(word, at)) != std::string_view::npos;) {
    at += word.size();
    const std::size_t begin =
        at < name.size() && std::string_view("-_=").find(name[at]) != std::string_view::npos
            ? at + 1
            : at;
    std::int64_t number = 0;
    const auto [end, error] =
        std::from_chars(name.data() + begin, name.data() + name.size(), number);
    if (error == std::errc{} && number >= 0) found = number;
  }
  return found;
}

std::optional<std::int64_t> step_in(std::string_view name) {
  for (const std::string_view word : {"step", "iter", "checkpoint", "ckpt", "epoch"})
    if (const auto number = number_after(name, word)) return number;
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  const bool whole = error == std::errc{} && end == name.data() + name.size() && number >= 0;
  return whole ? std::optional(number) : std::nullopt;
}

/// Size and time of files.
struct Extent {
  std::int64_t bytes = 0, time = 0;
  void add(const Extent& other) {
    bytes += other.bytes;
    time = std::max(time, other.time);
  }
};

Extent extent_of(const fs::path& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) return {};
  return {S_ISREG(status.st_mode) ? status.st_size : 0, status.st_mtime};
}

// Kind of a directory that cannot be opened.
std::string kind_of(const fs::path& dir) {
  if (is_safetensors_directory(dir)) return "Hugging Face model";
  if (is_rank_files(dir)) return "PyTorch FSDP checkpoint of rank files";
  if (is_deepspeed(dir)) return "DeepSpeed checkpoint";
  return "PyTorch checkpoint";
}

class Search {
 public:
  explicit Search(fs::path root) : root_(std::move(root)) {}

  std::vector<FoundCheckpoint> run() {
    std::error_code error;
    if (fs::is_directory(root_, error))
      scan(root_, 0);
    else
      add_file(root_);
    const auto key = [](const FoundCheckpoint& each) {
      return std::tuple(each.step.value_or(-1), each.path);
    };
    std::ranges::sort(found_, {}, key);
    mark_newest();
    return std::move(found_);
  }

 private:
  // @return extent of the files below `dir` that are of no checkpoint in the list
  Extent scan(const fs::path& dir, int level) {
    require(++directories_ <= kMaxDirectories,
            "{} contains more than {} directories; give one with the checkpoints of one run",
            root_.string(), kMaxDirectories);
    std::error_code error;
    const std::vector<fs::path> paths =
        level == 0 ? list_directory(dir) : list_directory(dir, error);
    const std::size_t before = found_.size();
    Extent extent;
    for (const fs::path& path : paths) {
      const std::string name = path.filename().string();
      if (name.ends_with(".seal.json")) continue;
      const bool is_hidden = name.starts_with('.');
      if (!fs::is_directory(path, error))
        extent.add(extent_of(path));
      else if (level < kMaxLevels && !is_hidden && !fs::is_symlink(path, error))
        extent.add(scan(path, level + 1));
    }
    if (is_adapter_directory(dir)) {
      add(dir, "LoRA adapters (PEFT)", "", extent);
    } else if (is_sharded(dir)) {
      const auto below = found_.begin() + static_cast<std::ptrdiff_t>(before);
      if (is_accelerate(dir)) {  // its folders are one checkpoint
        for (auto each = below; each != found_.end(); ++each) extent.add({each->bytes, each->time});
        found_.erase(below, found_.end());
      }
      // A run, whose checkpoints are in the list.
      const bool is_run = is_deepspeed(dir) || is_megatron_run(dir);
      if (below != found_.end() && is_run && !is_safetensors_directory(dir)) return extent;
      add_opened(dir, extent);
    } else {
      for (const fs::path& path : paths) {
        const Extent file = extent_of(path);
        if (add_file(path)) extent.bytes -= file.bytes;
      }
      return extent;
    }
    return {};
  }

  void add(const fs::path& path, const std::string& kind, const std::string& problem,
           const Extent& extent) {
    FoundCheckpoint found{path, kind, {}, problem, extent.bytes, extent.time};
    // Names below the root, from the innermost on; of the root itself, its own.
    const fs::path below = path == root_ ? path.filename() : path.lexically_relative(root_);
    for (const fs::path& part : below)
      if (const auto step = step_in(part.string())) found.step = step;
    found_.push_back(std::move(found));
  }

  void add_opened(const fs::path& path, const Extent& extent) {
    try {
      add(path, open_sharded(path, {}, false)->kind(), "", extent);
    } catch (const Error& error) {
      add(path, kind_of(path), error.what(), extent);
    }
  }

  // @return whether the file is in the list
  bool add_file(const fs::path& path) {
    const Extent extent = extent_of(path);
    if (is_gguf(path)) {
      std::string problem;
      try {
        read_gguf_header(File::open(path));
      } catch (const Error& error) {
        problem = error.what();
      }
      add(path, "GGUF file", problem, extent);
      return true;
    }
    if (!is_saved_file(path)) return false;
    const std::string kind = path.extension() == ".ckpt" ? "PyTorch checkpoint" : "PyTorch file";
    try {
      const auto source = open_saved_file(path);
      if (source->tensors().empty() && source->unreadable().empty()) return false;
      add(path, source->kind(), "", extent);
    } catch (const CorruptCheckpoint& error) {
      add(path, kind, error.what(), extent);
    } catch (const Error& error) {
      if (path.extension() != ".ckpt" && path != root_) return false;  // such as a scheduler's
      add(path, kind, error.what(), extent);
    }
    return true;
  }

  void mark_newest() {
    const auto order = [](const FoundCheckpoint& each) {
      return std::pair(each.step.value_or(-1), each.step ? 0 : each.time);
    };
    std::optional<std::pair<std::int64_t, std::int64_t>> most;
    for (const FoundCheckpoint& each : found_)
      if (each.problem.empty()) most = std::max(most.value_or(order(each)), order(each));
    for (FoundCheckpoint& each : found_) each.newest = each.problem.empty() && order(each) == most;
  }

  const fs::path root_;
  std::vector<FoundCheckpoint> found_;
  int directories_ = 0;
};

}  // namespace

bool is_adapter_directory(const fs::path& dir) {
  return is_peft(dir) && (is_there(dir / "adapter_model.safetensors") ||
                          is_there(dir / "adapter_model.bin") || !is_sharded(dir));
}

bool is_foreign(const fs::path& path) { return is_gguf(path) || is_peft(path) || is_sharded(path); }

std::unique_ptr<TensorSource> open_foreign(const fs::path& path) {
  if (is_gguf(path)) return std::make_unique<GgufSource>(path);
  if (is_adapter_directory(path)) return open_peft_tensors(path);
  return open_sharded(path);
}

fs::path folder_of_run(const fs::path& path) {
  try {
    if (is_megatron_run(path)) return find_megatron(path);
    if (is_deepspeed(path)) {
      const DeepSpeedFiles files = find_deepspeed(path);
      return (files.run / files.models.front()).parent_path();
    }
  } catch (const Error&) {  // which open_foreign() throws, too
  }
  return path;
}

std::vector<FoundCheckpoint> find_sharded(const fs::path& path) { return Search(path).run(); }

}  // namespace tessera::io
