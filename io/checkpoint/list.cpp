#include "io/checkpoint/list.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <ctime>

#include "core/base/error.h"

namespace tessera::io {
namespace {

// Splits "step-00001200.a1b2c3.tmp" into 1200 and ".a1b2c3.tmp".
std::optional<std::pair<std::int64_t, std::string>> parse_name(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::int64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc{} || step < 0 || stop - name.data() < 13 || (stop != end && *stop != '.'))
    return std::nullopt;
  return std::pair(step, std::string(stop, end));
}

// Whether tessera creates directories with this ending. Others are the user's.
bool is_ours(const std::string& ending) {
  return ending.empty() || ending.ends_with(".tmp") || ending.starts_with(".unusable");
}

// Sets the total size of the files and the latest change of a file or the directory.
void measure(ListedCheckpoint& entry) {
  const auto look = [&](const fs::path& path) {
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0) return;
    if (S_ISREG(status.st_mode)) entry.bytes += status.st_size;
    entry.time = std::max<std::int64_t>(entry.time.value_or(0), status.st_mtime);
  };
  look(entry.path);
  std::error_code error;
  fs::directory_iterator items(entry.path, error);
  for (; !error && items != fs::directory_iterator(); items.increment(error)) look(items->path());
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

ListedCheckpoint examine(const fs::path& path, std::int64_t step, const std::string& rest,
                         const Check& check) {
  ListedCheckpoint entry;
  entry.path = path;
  entry.step = step;
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
  } else {
    std::error_code absent;
    if (fs::exists(path / "index.json", absent)) {
      read_index(entry, check);
    } else {
      entry.state = CheckpointState::Broken;
      entry.problem = "it has no index.json";
    }
  }
  return entry;
}

}  // namespace

std::string_view state_name(CheckpointState state) {
  switch (state) {
    case CheckpointState::Committed:
      return "committed";
    case CheckpointState::Broken:
      return "broken";
    case CheckpointState::Newer:
      return "newer format";
    case CheckpointState::Attempt:
      return "attempt";
    case CheckpointState::Removing:
      return "removing";
    case CheckpointState::SetAside:
      return "set aside";
  }
  return "unknown";
}

std::vector<ListedCheckpoint> list_checkpoints(const fs::path& run_or_checkpoints_dir,
                                               const Check& check) {
  std::error_code error;
  fs::path dir = run_or_checkpoints_dir;
  require<IoError>(!fs::is_regular_file(dir, error),
                   "{} is a file; give the directory of a checkpoint or a run", dir.string());
  error.clear();
  if (fs::is_directory(dir / "checkpoints", error)) dir /= "checkpoints";
  std::vector<ListedCheckpoint> entries;
  fs::directory_iterator items(dir, error);
  for (; !error && items != fs::directory_iterator(); items.increment(error)) {
    std::error_code gone;
    const auto name = parse_name(items->path().filename().string());
    if (name && is_ours(name->second) && items->is_directory(gone)) {
      entries.push_back(examine(items->path(), name->first, name->second, check));
    }
  }
  require<IoError>(!error, "cannot list {}: {}", dir.string(), error.message());
  std::sort(entries.begin(), entries.end(),
            [](const ListedCheckpoint& a, const ListedCheckpoint& b) {
              return a.step != b.step ? a.step < b.step : a.path < b.path;
            });
  return entries;
}

std::optional<std::int64_t> parse_time(const std::string& text) {
  std::tm time{};
  const char* const stop = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%SZ", &time);
  if (stop == nullptr || *stop != '\0') return std::nullopt;
  return ::timegm(&time);
}

}  // namespace tessera::io
