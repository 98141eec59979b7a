#include "io/checkpoint/retention.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "io/checkpoint/agree.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/read_back.h"

namespace tessera::io {
namespace {

std::set<std::int64_t> best_steps(const std::vector<StepItem>& entries,
                                  const Retention& retention) {
  std::set<std::int64_t> steps;
  if (retention.keep_best <= 0 || !retention.loss) return steps;
  std::vector<std::pair<double, std::int64_t>> order;  // loss, -step: later steps win ties
  for (const StepItem& entry : entries) {
    try {
      const auto loss = retention.loss(entry.path);
      if (loss && std::isfinite(*loss)) order.emplace_back(*loss, -entry.step);
    } catch (const Error&) {
      steps.insert(entry.step);  // may be one of the best
    }
  }
  std::sort(order.begin(), order.end());
  order.resize(std::min(order.size(), static_cast<std::size_t>(retention.keep_best)));
  for (const auto& [loss, step] : order) steps.insert(-step);
  return steps;
}

// An unreadable index or loss counts as a newer format: the checkpoint is kept.
bool may_be_newer_format(const fs::path& path, const Retention& retention) {
  const std::string source = (path / "index.json").string();
  try {
    parse_index(read_file(source, kMaxIndexBytes, Links::Refuse), source);
    if (retention.loss) retention.loss(path);
  } catch (const Error& error) {
    return dynamic_cast<const NewerFormat*>(&error) || dynamic_cast<const IoError*>(&error);
  }
  return false;
}

std::vector<fs::path> find_superfluous(const SaveRequest& saved, const Retention& retention) {
  auto entries = find_checkpoints(saved.checkpoints_dir);
  std::erase_if(entries, [&](const StepItem& entry) { return entry.step > saved.step; });
  std::map<std::int64_t, fs::path> superfluous;        // by step
  std::erase_if(entries, [&](const StepItem& entry) {  // no rule may count a damaged one
    return retention.damaged && retention.damaged->contains(entry.step) &&
           superfluous.emplace(entry.step, entry.path).second;
  });
  const std::set<std::int64_t> best = best_steps(entries, retention);
  int newest = 0;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    const bool for_good = retention.keep_every > 0 && entry->step % retention.keep_every == 0;
    const bool may_go = newest >= retention.keep && !for_good && !best.contains(entry->step);
    if (newest >= retention.keep && !may_go) continue;
    if (entry->step != saved.step && may_be_newer_format(entry->path, retention)) continue;
    if (may_go) superfluous.emplace(entry->step, entry->path);
    ++newest;
  }
  std::vector<fs::path> paths;
  for (const auto& [step, path] : superfluous) paths.push_back(path);
  return paths;
}

void remove_durably(const fs::path& path) {
  fs::path gone = path;
  gone += ".pruned.tmp";
  std::error_code error;
  fs::remove_all(gone, error);
  rename_path(path, gone);
  sync_directory(path.parent_path());  // so that no power cut leaves `path` with missing files
  fs::remove_all(gone, error);
  require<IoError>(!error, "cannot remove {}: {}", gone.string(), error.message());
}

}  // namespace

std::vector<fs::path> prune_checkpoints(const SaveRequest& saved, const Retention& retention,
                                        SaveCoordinator& coordinator) {
  std::vector<fs::path> superfluous;  // filled on rank 0 only
  if (retention.keep <= 0) return superfluous;
  if (retention.damaged) retention.damaged->erase(saved.step);
  const fs::path path = saved.checkpoints_dir / checkpoint_name(saved.step);
  const Failure failure{fmt::format("{} is not verified", path.string()),
                        "no other checkpoint was removed"};
  const auto phase = [&](std::string_view name) {
    return fmt::format("prune/{}/{}", checkpoint_name(saved.step), name);
  };
  try {
    const auto found = agree(saved, coordinator, phase("superfluous"), failure, [&] {
      if (saved.rank == 0) superfluous = find_superfluous(saved, retention);
      if (!superfluous.empty()) {
        const auto reader = open_patiently(path);
        if (reader.index().trainer) (void)reader.trainer_json();
      }
      return std::to_string(superfluous.size());
    });
    if (found[0] == "0") return superfluous;
    agree(saved, coordinator, phase("verified"), failure, [&] {
      read_back(path, saved, saved.hurry.get());
      return std::string();
    });
  } catch (const FoundDamage& damage) {
    if (retention.damaged) retention.damaged->insert(saved.step);
    throw IoError("{}; a resume skips this one", damage.what());
  }
  try {
    for (const fs::path& gone : superfluous) remove_durably(gone);
  } catch (const IoError& error) {
    throw IoError("rank {}: {}", saved.rank, error.what());
  }
  return superfluous;
}

}  // namespace tessera::io
