#include "io/checkpoint/list.h"

#include <sys/stat.h>

#include <algorithm>
#include <ctime>

#include "core/base/error.h"
#include "io/checkpoint/find.h"

namespace tessera::io {
namespace {

// Whether tessera creates directories with this ending. Others belong to the user.
bool is_ours(const std::string& ending) {
  return ending.empty() || ending.ends_with(".tmp") || ending.starts_with(".unusable");
}

// Sets the total size of the files, and the time of the latest change of a file or the directory.
void measure(ListedCheckpoint& entry) {
  const auto look = [&](const fs::path& path) {
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0) return;
    if (S_ISREG(status.st_mode)) entry.bytes += status.st_size;
    entry.time = std::max<std::int64_t>(entry.time.value_or(0), status.st_mtime);
  };
  look(entry.path);
  std::error_code error;
  for (const fs::path& path : list_directory(entry.path, error)) look(path);
}

using Check = std::function<void(const CheckpointReader&)>;

void read_index(ListedCheckpoint& entry, const Check& check) {
  try {
    const auto reader = CheckpointReader::open(entry.path);
    if (check) check(reader);
    CheckpointIndex index = reader.index();
    if (index.model) entry.sections.emplace_back("model");
    if (index.optimizer) entry.sections.emplace_back("optimizer");
    if (index.trainer) entry.sections.emplace_back("trainer");
    index.model.reset();
    index.optimizer.reset();
    entry.time = parse_time(index.created);
    entry.index = std::move(index);
  } catch (const NewerFormat& error) {
    entry.state = CheckpointState::Newer;
    entry.problem = error.what();
  } catch (const Error& error) {
    entry.state = CheckpointState::Broken;
    entry.problem = error.what();
  }
}

ListedCheckpoint examine(const StepItem& item, const Check& check) {
  const std::string& rest = item.ending;
  ListedCheckpoint entry;
  entry.path = item.path;
  entry.step = item.step;
  measure(entry);
  if (rest.ends_with(".pruned.tmp")) {
    entry.state = CheckpointState::Removing;
    entry.problem = "its removal was not finished; the next save finishes it";
  } else if (rest.ends_with(".tmp")) {
    entry.state = CheckpointState::Attempt;
    entry.problem = fmt::format("run {} is saving it, or failed to; the next save removes it",
                                rest.size() > 5 ? rest.substr(1, rest.size() - 5) : "(none)");
  } else if (!rest.empty()) {
    entry.state = CheckpointState::SetAside;
    entry.problem = "it could not be read, so a run resumed from an earlier checkpoint";
  } else if (is_there(item.path / "index.json")) {
    read_index(entry, check);
  } else {
    entry.state = CheckpointState::Broken;
    entry.problem = "it has no index.json";
  }
  return entry;
}

}  // namespace

std::string_view state_name(CheckpointState state) {
  constexpr std::string_view kNames[] = {"committed", "broken",   "newer format",
                                         "attempt",   "removing", "set aside"};
  return kNames[static_cast<std::size_t>(state)];
}

std::vector<ListedCheckpoint> list_checkpoints(const fs::path& run_or_checkpoints_dir,
                                               const Check& check) {
  std::vector<ListedCheckpoint> entries;
  for (const StepItem& item : list_steps(run_or_checkpoints_dir)) {
    std::error_code gone;
    if (is_ours(item.ending) && fs::is_directory(item.path, gone)) {
      entries.push_back(examine(item, check));
    }
  }
  return entries;
}

std::optional<std::int64_t> parse_time(const std::string& text) {
  std::tm time{};
  const char* const stop = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%SZ", &time);
  if (stop == nullptr || *stop != '\0') return std::nullopt;
  return ::timegm(&time);
}

}  // namespace tessera::io
