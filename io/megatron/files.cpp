#include "io/megatron/files.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <vector>

#include "core/base/error.h"
#include "io/dcp/dcp_source.h"
#include "io/source/other_formats.h"

namespace tessera::io {
namespace {

constexpr const char* kTracker = "latest_checkpointed_iteration.txt";
constexpr std::int64_t kMaxTracker = 4096;  // bytes
constexpr const char* kMetadataOfIteration = ".metadata";

std::string folder_of(std::int64_t iteration) { return fmt::format("iter_{:07}", iteration); }

// The folder that the tracker names: an iteration, or "release" for weights alone.
std::string newest(const fs::path& run) {
  const fs::path path = run / kTracker;
  std::string text = read_file(path, kMaxTracker);
  text.erase(text.find_last_not_of(" \n\r\t") + 1);
  if (text == "release") return text;
  const bool is_number = !text.empty() && text.size() <= 18 &&
                         text.find_first_not_of("0123456789") == std::string::npos;
  require<CorruptCheckpoint>(is_number, "{} holds \"{}\", but no number of an iteration",
                             path.string(), text.substr(0, 100));
  return folder_of(std::stoll(text));
}

}  // namespace

// Not verl, which writes a tracker of that name beside folders global_step_N.
bool is_megatron_run(const fs::path& dir) {
  if (is_there(dir / "weights" / kMetadataOfIteration)) return true;
  if (!is_there(dir / kTracker)) return false;
  std::error_code ignored;
  return std::ranges::any_of(list_directory(dir, ignored), [](const fs::path& path) {
    const std::string name = path.filename().string();
    return name.starts_with("iter_") || name == "release";
  });
}

fs::path find_megatron(const fs::path& run, std::optional<std::int64_t> iteration) {
  if (!is_there(run / kTracker)) {
    require(!iteration, "{} is a checkpoint of NeMo and has no step {}", run.string(),
            iteration.value_or(0));
    return run / "weights";
  }
  const std::string folder = iteration ? folder_of(*iteration) : newest(run);
  const fs::path dir = run / folder;
  if (is_there(dir / kMetadataOfIteration)) return dir;
  refuse_other_format(dir);
  std::vector<std::string> others;
  for (const fs::path& path : list_directory(run))
    if (is_there(path / kMetadataOfIteration)) others.push_back(path.filename().string());
  std::ranges::sort(others);
  const std::string have =
      others.empty() ? "no finished iteration" : fmt::format("{}", fmt::join(others, ", "));
  require(!iteration, "{} has no finished {}: it has {}", run.string(), folder, have);
  throw CorruptCheckpoint(
      "{} names {}, which has no {}, so its save was not finished; the run has {}: choose one with "
      "--step",
      (run / kTracker).string(), folder, kMetadataOfIteration, have);
}

std::unique_ptr<ShardedSource> open_megatron(const fs::path& run,
                                             std::optional<std::int64_t> iteration) {
  auto source = open_dcp(find_megatron(run, iteration));
  if (is_there(run / "config.json")) source->set_config_dir(run);
  return source;
}

}  // namespace tessera::io
