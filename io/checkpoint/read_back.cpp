#include "io/checkpoint/read_back.h"

#include <set>
#include <string>

#include "core/base/error.h"
#include "io/checkpoint/verify.h"

namespace tessera::io {

void read_back(const fs::path& dir, const SaveRequest& request) {
  const std::string source = (dir / "index.json").string();
  const CheckpointIndex index =
      parse_index(read_file(source, kMaxIndexBytes, Links::Refuse), source);
  VerifyOptions options;
  options.files.emplace();
  int next = 0;
  for (const auto& [name, size] : index.files) {
    if (next++ % request.world_size == request.rank) options.files->insert(name);
  }
  if (request.pulse) {
    options.progress = [&](std::int64_t, std::int64_t) {
      request.pulse->fetch_add(1, std::memory_order_relaxed);
    };
  }
  const auto problems = verify_checkpoint(dir, index, options).problems;
  if (problems.empty()) return;
  throw CorruptCheckpoint(
      "{} is not as it was saved: {}{}", dir.string(), problems[0].str(),
      problems.size() == 1 ? "" : fmt::format(" (and {} more problems)", problems.size() - 1));
}

}  // namespace tessera::io
