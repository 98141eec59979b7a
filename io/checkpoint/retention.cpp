#include "io/checkpoint/retention.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "io/checkpoint/find.h"

namespace tessera::io {
namespace {

std::set<std::int64_t> best_steps(const std::vector<CheckpointEntry>& entries,
                                  const Retention& retention) {
  std::set<std::int64_t> steps;
  if (retention.keep_best <= 0 || !retention.loss) return steps;
  std::set<std::int64_t> unknown;
  std::vector<std::pair<double, std::int64_t>> order;  // by loss, later first
  for (const CheckpointEntry& entry : entries) {
    try {
      const auto loss = retention.loss(entry.path);
      if (loss && std::isfinite(*loss)) order.emplace_back(*loss, -entry.step);
    } catch (const Error&) {
      unknown.insert(entry.step);  // it may be the best, and stays
    }
  }
  std::sort(order.begin(), order.end());
  order.resize(std::min(order.size(), static_cast<std::size_t>(retention.keep_best)));
  for (const auto& [loss, step] : order) steps.insert(-step);
  steps.merge(unknown);
  return steps;
}

void verify_saved(const std::vector<CheckpointEntry>& entries, const fs::path& checkpoints_dir,
                  std::int64_t saved) {
  require<IoError>(!entries.empty() && entries.back().step == saved,
                   "{} is not there, though it was saved; no other checkpoint was removed",
                   (checkpoints_dir / checkpoint_name(saved)).string());
  const auto reader = CheckpointReader::open(entries.back().path);
  if (reader.index().trainer) (void)reader.trainer_json();
}

void remove_durably(const fs::path& path) {
  fs::path gone = path;
  gone += ".pruned.tmp";
  std::error_code error;
  fs::remove_all(gone, error);
  rename_path(path, gone);
  sync_directory(path.parent_path());  // a power cut must not leave the name without its files
  fs::remove_all(gone, error);
  require<IoError>(!error, "cannot remove {}: {}", gone.string(), error.message());
}

}  // namespace

std::vector<fs::path> prune_checkpoints(const fs::path& checkpoints_dir, const Retention& retention,
                                        std::int64_t saved) {
  std::vector<fs::path> removed;
  if (retention.keep <= 0) return removed;
  auto entries = find_checkpoints(checkpoints_dir);
  std::erase_if(entries, [&](const CheckpointEntry& entry) { return entry.step > saved; });
  const std::set<std::int64_t> best = best_steps(entries, retention);
  std::vector<fs::path> superfluous;
  for (std::size_t i = 0; i + static_cast<std::size_t>(retention.keep) < entries.size(); ++i) {
    const std::int64_t step = entries[i].step;
    const bool for_good = retention.keep_every > 0 && step % retention.keep_every == 0;
    if (!for_good && !best.contains(step)) superfluous.push_back(entries[i].path);
  }
  if (superfluous.empty()) return removed;
  verify_saved(entries, checkpoints_dir, saved);
  for (const fs::path& path : superfluous) {
    remove_durably(path);
    removed.push_back(path);
  }
  return removed;
}

}  // namespace tessera::io
