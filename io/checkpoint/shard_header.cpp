#include "io/checkpoint/shard_header.h"

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "io/base/crc64.h"

namespace tessera::io {
namespace {

std::uint64_t checksum_of_start(const File& file, std::int64_t size) {
  std::vector<char> buffer(
      static_cast<std::size_t>(std::min<std::int64_t>(size, std::int64_t{1} << 20)));
  std::uint64_t crc = 0;
  for (std::int64_t done = 0; done < size;) {
    const auto n = std::min<std::int64_t>(size - done, static_cast<std::int64_t>(buffer.size()));
    file.read(done, buffer.data(), static_cast<std::size_t>(n));
    crc = crc64(buffer.data(), static_cast<std::size_t>(n), crc);
    done += n;
  }
  return crc;
}

}  // namespace

SafetensorsHeader read_shard_header(const File& file, const std::string& name,
                                    const CheckpointIndex& index) {
  SafetensorsHeader header = read_safetensors_header(file);
  const auto check = [&](const char* key, const std::string& expected) {
    const auto found = header.metadata.find(key);
    if (found == header.metadata.end() || found->second == expected) return;
    throw CorruptCheckpoint("{} has {} {}, but the index has {}: it belongs to another checkpoint",
                            file.path().string(), key, found->second, expected);
  };
  check("step", std::to_string(index.step));
  check("run_id", index.run_id);
  check("world_size", std::to_string(index.world_size));
  // Checked last: a shard of another checkpoint is the better diagnosis.
  const auto saved = index.headers.find(name);
  if (saved != index.headers.end()) {
    require<CorruptCheckpoint>(checksum_of_start(file, saved->second.size) == saved->second.crc64,
                               "{}: the checksum of its header (bytes 0 to {}) is wrong: it was "
                               "damaged after the save",
                               file.path().string(), saved->second.size);
  }
  return header;
}

}  // namespace tessera::io
