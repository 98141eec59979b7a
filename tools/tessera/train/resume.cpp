#include "tools/tessera/train/resume.h"

#include <fmt/ranges.h>

#include <cstdint>
#include <set>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/checkpoint/find.h"
#include "models/arch.h"
#include "train/trainer_state.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAside = ".unusable";

struct Checkpoints {
  std::vector<io::StepItem> named;      // step-*, by ascending step
  std::vector<fs::path> without_index;  // among `named`
  std::vector<fs::path> aside;          // *.unusable
};

Checkpoints look_into(const fs::path& dir) {
  Checkpoints result;
  for (const io::StepItem& item : io::list_steps(dir)) {
    if (item.ending.starts_with(kAside)) result.aside.push_back(item.path);
    if (!item.ending.empty()) continue;
    result.named.push_back(item);
    std::error_code error;
    if (fs::status(item.path / "index.json", error).type() == fs::file_type::not_found)
      result.without_index.push_back(item.path);
  }
  return result;
}

// Validates model section and trainer state before tensors are read.
void check_state(const io::CheckpointReader& reader) {
  models::parse_arch(reader.index().model_config, reader.path().string());
  if (reader.index().trainer) train::read_trainer_state(reader);
}

void require_no_run(const fs::path& run_dir, const std::string& resume) {
  std::error_code absent;
  const auto metrics = fs::file_size(run_dir / "metrics.jsonl", absent);
  require(
      resume == "auto" || absent || metrics == 0,
      "{} holds a run (metrics.jsonl), and checkpoint.resume is never; choose another --run.out",
      run_dir.string());
}

std::optional<fs::path> find_own(const fs::path& run_dir, const std::string& resume,
                                 const std::map<fs::path, std::string>& unusable,
                                 std::vector<std::string>& notes) {
  const fs::path checkpoints = run_dir / "checkpoints";
  std::error_code unreadable;
  if (fs::symlink_status(checkpoints, unreadable).type() == fs::file_type::not_found) {
    require_no_run(run_dir, resume);
    return std::nullopt;
  }
  // Throws, for example, on a link to an unmounted disk.
  require<IoError>(
      fs::is_directory(checkpoints, unreadable),
      "cannot read {}{}{}; a new run is not started over checkpoints that can't be seen: make the "
      "directory readable, or choose another --run.out",
      checkpoints.string(), unreadable ? ": " : ", which is not a directory",
      unreadable ? unreadable.message() : "");
  const Checkpoints found = look_into(checkpoints);
  if (found.named.empty()) {
    require<CorruptCheckpoint>(
        found.aside.empty(),
        "{} has only checkpoints set aside as unusable ({}); start a new run with another "
        "--run.out, or move them away",
        checkpoints.string(), found.aside.empty() ? "" : found.aside.back().filename().string());
    require_no_run(run_dir, resume);
    return std::nullopt;
  }
  require(
      resume == "auto",
      "{} holds a run with checkpoints up to step {}; continue it with --checkpoint.resume auto, "
      "or choose another --run.out",
      run_dir.string(), found.named.back().step);
  std::set<fs::path> passed_over;
  std::vector<std::string> reasons;
  for (const auto& [path, why] : unusable) {
    passed_over.insert(path);
    reasons.push_back(fmt::format("{} is skipped: {}", path.string(), why));
  }
  auto newest = io::newest_valid(run_dir, {.passed_over = passed_over, .check = check_state});
  for (const fs::path& path : found.without_index) {
    newest.skipped.push_back(path.string() +
                             " is skipped: it has no index.json, without which its shards cannot "
                             "be read");
  }
  reasons.insert(reasons.end(), newest.skipped.begin(), newest.skipped.end());
  require<CorruptCheckpoint>(newest.reader.has_value(),
                             "none of the {} checkpoints of {} can be used ({}); repair one, or "
                             "start a new run with another --run.out",
                             found.named.size(), run_dir.string(), fmt::join(reasons, "; "));
  notes.insert(notes.end(), newest.skipped.begin(), newest.skipped.end());
  return newest.reader->path();
}

}  // namespace

std::optional<fs::path> find_resume(const fs::path& run_dir, const std::string& resume,
                                    const std::map<fs::path, std::string>& unusable,
                                    std::vector<std::string>& notes) {
  if (resume == "auto" || resume == "never") return find_own(run_dir, resume, unusable, notes);
  require(
      fs::is_directory(resume),
      "checkpoint.resume is {}, which is not a directory; name a checkpoint or a run, or use auto "
      "or never",
      resume);
  const fs::path own = run_dir / "checkpoints";
  const fs::path named = io::locate_checkpoint(resume);
  std::error_code absent;
  const bool has_own = fs::is_directory(own, absent);
  const Checkpoints found = has_own ? look_into(own) : Checkpoints{};
  const bool elsewhere =
      !has_own || fs::weakly_canonical(named).parent_path() != fs::canonical(own);
  if (elsewhere && found.named.size() > found.without_index.size()) {
    // The same command was repeated after the run was killed: prefer the run's own checkpoints.
    notes.push_back(
        fmt::format("{} already has its own checkpoints and resumes from those, not from {} "
                    "(checkpoint.resume); to start from that again, choose another --run.out",
                    run_dir.string(), named.string()));
    return find_own(run_dir, "auto", unusable, notes);
  }
  const io::CheckpointReader reader = io::open_checkpoint(resume);
  const auto why = unusable.find(reader.path());
  require<CorruptCheckpoint>(why == unusable.end(), "{} cannot be read: {}", reader.path().string(),
                             why == unusable.end() ? "" : why->second);
  // New saves would have lower steps than existing ones.
  require(
      found.named.empty() || found.named.back().step <= reader.index().step,
      "{} is later than {}, which checkpoint.resume names; start a branch with another --run.out, "
      "or continue the later one with --checkpoint.resume auto",
      found.named.empty() ? "" : found.named.back().path.string(), reader.path().string());
  return reader.path();
}

std::vector<std::string> set_aside_later(const fs::path& run_dir, std::int64_t step) {
  const fs::path checkpoints = run_dir / "checkpoints";
  std::vector<std::string> notes;
  std::error_code absent;
  if (!fs::is_directory(checkpoints, absent)) return notes;
  for (const io::StepItem& item : look_into(checkpoints).named) {
    if (item.step <= step) continue;
    fs::path aside = item.path;
    for (aside += kAside; fs::exists(aside, absent); aside += "-again") {
    }
    io::rename_path(item.path, aside);
    notes.push_back(
        fmt::format("{} is set aside as {}", item.path.string(), aside.filename().string()));
  }
  return notes;
}

}  // namespace tessera::tools
