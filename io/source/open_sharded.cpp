#include "io/source/open_sharded.h"

#include "core/base/error.h"
#include "io/dcp/dcp_source.h"
#include "io/deepspeed/deepspeed_source.h"
#include "io/deepspeed/files.h"
#include "io/safetensors/directory.h"
#include "io/torch/torch_directory.h"

namespace tessera::io {

// Detects the parent directory of checkpoints, because torchtitan and others keep one per step.
void refuse_parent_of_shards(const fs::path& dir) {
  std::error_code ignored;
  std::vector<fs::path> found = list_directory(dir, ignored);
  std::erase_if(found, [](const fs::path& path) { return !is_there(path / ".metadata"); });
  require(found.empty(),
          "{} contains {} PyTorch checkpoint{}, but is not one itself; give one of them, such as "
          "{}",
          dir.string(), found.size(), found.size() == 1 ? "" : "s",
          found.empty() ? "" : found.back().string());
}

bool is_sharded(const fs::path& dir) {
  std::error_code error;
  return fs::is_directory(dir, error) &&
         (is_safetensors_directory(dir) || is_dcp(dir) || is_dcp_safetensors(dir) ||
          is_torch_directory(dir) || is_deepspeed(dir));
}

std::unique_ptr<ShardedSource> open_sharded(const fs::path& dir,
                                            std::optional<std::int64_t> shards) {
  std::unique_ptr<ShardedSource> source;
  if (is_safetensors_directory(dir)) {
    source = open_safetensors_directory(dir);
  } else if (is_dcp(dir)) {
    source = open_dcp(dir);
  } else if (is_dcp_safetensors(dir)) {
    return open_dcp_safetensors(dir, shards);
  } else if (is_torch_directory(dir)) {
    source = open_torch_directory(dir);
  } else if (is_deepspeed(dir)) {
    source = open_deepspeed(dir);
  } else {
    refuse_parent_of_shards(dir);
  }
  require(!shards || !source, "{} is a {}, which records its number of shards; omit --shards",
          dir.string(), source ? source->kind() : "");
  return source;
}

}  // namespace tessera::io
