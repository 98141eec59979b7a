#include "io/source/open_sharded.h"

#include "core/base/error.h"
#include "io/dcp/dcp_source.h"
#include "io/deepspeed/deepspeed_source.h"
#include "io/deepspeed/files.h"
#include "io/megatron/files.h"
#include "io/safetensors/directory.h"
#include "io/torch/rank_files.h"
#include "io/torch/torch_directory.h"

namespace tessera::io {

// Detects the parent directory of checkpoints, because torchtitan and others keep one per step.
void refuse_parent_of_shards(const fs::path& dir) {
  std::error_code ignored;
  std::vector<fs::path> found = list_directory(dir, ignored);
  std::erase_if(found, [&](const fs::path& path) {
    return !fs::is_directory(path, ignored) ||
           !(is_there(path / ".metadata") || is_rank_files(path) || is_deepspeed(path));
  });
  require(
      found.empty(),
      "{} contains {} checkpoint{} of PyTorch, but is not one itself; give one of them, such as "
      "{}",
      dir.string(), found.size(), found.size() == 1 ? "" : "s",
      found.empty() ? "" : found.back().string());
}

bool is_sharded(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return is_saved_file(path);
  return is_safetensors_directory(path) || is_dcp(path) || is_dcp_safetensors(path) ||
         is_torch_directory(path) || is_rank_files(path) || is_deepspeed(path) ||
         is_megatron_run(path);
}

std::unique_ptr<ShardedSource> open_sharded(const fs::path& path,
                                            std::optional<std::int64_t> shards, bool moments) {
  std::unique_ptr<ShardedSource> source;
  if (is_saved_file(path)) {
    source = open_saved_file(path);
  } else if (is_safetensors_directory(path)) {
    source = open_safetensors_directory(path);
  } else if (is_dcp(path)) {
    source = open_dcp(path);
  } else if (is_dcp_safetensors(path)) {
    return open_dcp_safetensors(path, shards);
  } else if (is_torch_directory(path)) {
    source = open_torch_directory(path, moments);
  } else if (is_rank_files(path)) {
    source = open_rank_files(path);
  } else if (is_deepspeed(path)) {
    source = open_deepspeed(path, moments);
  } else if (is_megatron_run(path)) {
    source = open_megatron(path);
  } else {
    refuse_parent_of_shards(path);
  }
  require(!shards || !source, "{} is a {}, which records its number of shards; omit --shards",
          path.string(), source ? source->kind() : "");
  return source;
}

}  // namespace tessera::io
