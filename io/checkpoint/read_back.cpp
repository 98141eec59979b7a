#include "io/checkpoint/read_back.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <string>

#include "core/base/error.h"
#include "io/checkpoint/verify.h"

namespace tessera::io {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kWhenHurried{1000};

}  // namespace

void read_back(const fs::path& dir, const SaveRequest& request, const std::atomic<bool>* hurry) {
  const std::string source = (dir / "index.json").string();
  const CheckpointIndex index =
      parse_index(read_file(source, kMaxIndexBytes, Links::Refuse), source);
  VerifyOptions options;
  options.files.emplace();
  int next = 0;
  for (const auto& [name, size] : index.files) {
    if (next++ % request.world_size == request.rank) options.files->insert(name);
  }
  std::optional<Clock::time_point> hurried;
  options.progress = [&](std::int64_t, std::int64_t) {
    if (request.pulse) request.pulse->fetch_add(1, std::memory_order_relaxed);
    if (hurry == nullptr || !*hurry) return;
    if (!hurried) hurried = Clock::now();
    require<IoError>(Clock::now() - *hurried < kWhenHurried,
                     "reading was cut short because training stops");
  };
  const auto problems = verify_checkpoint(dir, index, options).problems;
  if (problems.empty()) return;
  const auto damage = std::ranges::find(problems, false, &VerifyProblem::unread);
  const std::string more =
      problems.size() == 1 ? "" : fmt::format(" (and {} more problems)", problems.size() - 1);
  require<IoError>(damage != problems.end(), "{} could not be read back: {}{}", dir.string(),
                   problems[0].str(), more);
  throw CorruptCheckpoint("{} differs from what was saved: {}{}", dir.string(), damage->str(),
                          more);
}

}  // namespace tessera::io
