#include "io/data/verify_tokens.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/parallel.h"
#include "io/data/token_file.h"
#include "io/data/token_index.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kVerifyBytes = std::int64_t{512} << 10;  // read at once

std::uint64_t checksum_of_file(const fs::path& path,
                               const std::function<void(std::int64_t)>& on_read) {
  const File file = File::open(path);
  const std::int64_t size = file.size();
  std::string block(static_cast<std::size_t>(std::min(size, kVerifyBytes)), '\0');
  std::uint64_t crc = 0;
  for (std::int64_t at = 0; at < size; at += kVerifyBytes) {
    const auto n = static_cast<std::size_t>(std::min(size - at, kVerifyBytes));
    file.read(at, block.data(), n);
    crc = crc64(block.data(), n, crc);
    on_read(static_cast<std::int64_t>(n));
  }
  return crc;
}

/// Reads all ids. @throws Error naming the first one outside of the vocabulary
std::int64_t check_ids(const fs::path& path, std::int64_t vocab_size) {
  const TokenSourcePtr tokens = open_token_file(path.string(), vocab_size);
  std::vector<std::int32_t> block(static_cast<std::size_t>(kVerifyBytes) / sizeof(std::int32_t));
  for (std::int64_t at = 0; at < tokens->size(); at += std::ssize(block))
    tokens->read(at, std::min<std::int64_t>(std::ssize(block), tokens->size() - at), block.data());
  return tokens->size();
}

}  // namespace

VerifyTokensReport verify_tokens(const fs::path& path, const VerifyTokensOptions& options) {
  VerifyTokensReport report;
  std::error_code error;
  require<IoError>(is_there(path), "{} does not exist", path.string());
  const bool is_directory = fs::is_directory(path, error);
  std::optional<TokenIndex> index;
  std::vector<TokenShard> shards;
  if (is_directory) {
    index = read_token_directory(path);
    shards = index->shards;
  } else {
    shards.push_back({path.filename().string(), 0, 0, 0});
    report.without_checksum = 1;
  }
  const fs::path dir = is_directory ? path : path.parent_path();
  std::int64_t total = 0, done = 0;
  for (const TokenShard& shard : shards) {
    const auto size = fs::file_size(dir / shard.file, error);
    if (!error) total += static_cast<std::int64_t>(size);
  }
  std::mutex mutex;
  std::vector<std::string> found(shards.size());
  parallel_for_each(shards.size(), options.threads, [&](std::size_t i) {
    const TokenShard& shard = shards[i];
    const fs::path file = dir / shard.file;
    std::int64_t bytes = 0, tokens = 0;
    try {
      const std::uint64_t crc = checksum_of_file(file, [&](std::int64_t n) {
        bytes += n;
        const std::lock_guard lock(mutex);
        done += n;
        if (options.progress) options.progress(done, total);
      });
      tokens = check_ids(file, index ? index->vocab_size() : 0);
      if (index && tokens != shard.tokens)
        found[i] = fmt::format("has {} tokens, and the index counts {}", tokens, shard.tokens);
      else if (index && crc != shard.crc64)
        found[i] = fmt::format("has checksum {}, and the index {}", format_checksum(crc),
                               format_checksum(shard.crc64));
    } catch (const Error& problem) {
      found[i] = problem.what();
    }
    const std::lock_guard lock(mutex);
    report.bytes += bytes;
    report.tokens += tokens;
    ++report.shards;
  });
  for (std::size_t i = 0; i < shards.size(); ++i)
    if (!found[i].empty()) report.problems.push_back({shards[i].file, std::move(found[i])});
  return report;
}

}  // namespace tessera::io
