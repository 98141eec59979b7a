#include "io/checkpoint/find.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <thread>

#include "core/base/error.h"
#include "core/base/processors.h"
#include "io/checkpoint/verify.h"
#include "io/source/other_formats.h"

namespace tessera::io {
namespace {

constexpr std::string_view kPrefix = "step-";

}  // namespace

CheckpointReader open_patiently(const fs::path& path) {
  constexpr int kMoreLooks = 3;
  constexpr std::chrono::milliseconds kPause{300};
  for (int look = 0; look < kMoreLooks; ++look) {
    try {
      return CheckpointReader::open(path);
    } catch (const CorruptFile&) {
      std::this_thread::sleep_for(kPause);
    }
  }
  return CheckpointReader::open(path);
}

std::string checkpoint_name(std::int64_t step) { return fmt::format("{}{:08}", kPrefix, step); }

std::vector<StepItem> list_steps(const fs::path& run_or_checkpoints_dir) {
  std::error_code error;
  fs::path dir = run_or_checkpoints_dir;
  require(!fs::is_regular_file(dir, error),
          "{} is a file; give the directory of a checkpoint or a run", dir.string());
  if (fs::is_directory(dir / "checkpoints", error)) dir /= "checkpoints";
  std::vector<StepItem> items;
  for (const fs::path& path : list_directory(dir)) {
    const std::string name = path.filename().string();
    if (!name.starts_with(kPrefix)) continue;
    StepItem item{0, "", path};
    const char* const end = name.data() + name.size();
    const auto [stop, failure] = std::from_chars(name.data() + kPrefix.size(), end, item.step);
    if (failure != std::errc{} || item.step < 0 || stop < name.data() + kPrefix.size() + 8)
      continue;
    if (stop != end && *stop != '.') continue;
    item.ending.assign(stop, end);
    items.push_back(std::move(item));
  }
  std::ranges::stable_sort(items, {}, &StepItem::step);
  return items;
}

std::vector<StepItem> find_checkpoints(const fs::path& run_or_checkpoints_dir) {
  std::vector<StepItem> items = list_steps(run_or_checkpoints_dir);
  std::erase_if(items, [](const StepItem& item) {
    std::error_code absent;
    // Keeps a checkpoint that cannot be examined, because opening it reports the error.
    return !item.ending.empty() ||
           fs::status(item.path / "index.json", absent).type() == fs::file_type::not_found;
  });
  return items;
}

NewestCheckpoint newest_valid(const fs::path& run_or_checkpoints_dir,
                              const NewestOptions& options) {
  NewestCheckpoint newest;
  auto entries = find_checkpoints(run_or_checkpoints_dir);
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (options.passed_over.contains(entry->path)) continue;
    try {
      auto reader = open_patiently(entry->path);
      if (options.verify_data) {
        // Uses many threads, because a run that resumes has the machine to itself.
        const auto threads = std::clamp(usable_processors(), 2, 16);
        const VerifyReport report =
            verify_checkpoint(reader, {.threads = static_cast<int>(threads)});
        require<CorruptCheckpoint>(report.problems.empty(), "{}",
                                   report.problems.empty() ? "" : report.problems[0].str());
      }
      if (options.check) options.check(reader);
      newest.reader = std::move(reader);
      break;
    } catch (const NewerFormat&) {
      throw;
    } catch (const CorruptCheckpoint& error) {
      newest.skipped.push_back(
          fmt::format("{} is skipped: {}", entry->path.string(), error.what()));
    }
  }
  return newest;
}

fs::path locate_checkpoint(const fs::path& path, std::optional<std::int64_t> step) {
  if (is_there(path / "index.json")) return path;
  std::error_code error;
  if (fs::is_regular_file(path, error)) refuse_other_format(path);
  const auto entries = find_checkpoints(path);
  if (entries.empty()) refuse_other_format(path);
  require(!entries.empty(),
          "{0} is not a checkpoint and contains none (no step-*/index.json); give a "
          "checkpoint, a run, or a directory of checkpoints; `tessera checkpoint list {0}` finds "
          "those of other programs",
          path.string());
  if (!step) return entries.back().path;
  const auto entry = std::ranges::find(entries, *step, &StepItem::step);
  std::vector<std::int64_t> steps;
  for (const StepItem& each : entries) steps.push_back(each.step);
  require(entry != entries.end(), "{} has no checkpoint of step {}; it has {}", path.string(),
          *step, fmt::join(steps, ", "));
  return entry->path;
}

CheckpointReader open_checkpoint(const fs::path& path, std::optional<std::int64_t> step) {
  const fs::path found = locate_checkpoint(path, step);
  if (step || found == path) {
    auto reader = CheckpointReader::open(found);
    require(!step || *step == reader.index().step, "{} is the checkpoint of step {}, not of {}",
            path.string(), reader.index().step, step.value_or(0));
    return reader;
  }
  try {
    return CheckpointReader::open(found);
  } catch (const CorruptCheckpoint& broken) {
    const auto entries = find_checkpoints(path);
    if (entries.size() < 2) throw;
    const std::string text = fmt::format("{}; the previous checkpoint is {}", broken.what(),
                                         entries[entries.size() - 2].path.string());
    if (const auto* file = dynamic_cast<const CorruptFile*>(&broken)) {
      throw CorruptFile(file->file(), text);
    }
    throw CorruptCheckpoint("{}", text);
  }
}

}  // namespace tessera::io
