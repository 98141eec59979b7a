#include "io/checkpoint/section_source.h"

#include "core/base/error.h"

namespace tessera::io {

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
  // Checked last, because "belongs to another checkpoint" is the better diagnosis.
  const auto saved = index.headers.find(name);
  require<CorruptCheckpoint>(
      saved == index.headers.end() ||
          (header.size == saved->second.size && header.crc64 == saved->second.crc64),
      "{}: the checksum of its header (bytes 0 to {}) is wrong: it was damaged after the save",
      file.path().string(), header.size);
  return header;
}

SectionSource::SectionSource(const fs::path& dir, const CheckpointIndex& index,
                             const Section& section, bool check_headers)
    : dir_(dir), index_(index), section_(section), check_headers_(check_headers) {
  for (const auto& [name, record] : *index.tensors(section)) {
    tensors_.push_back({name, record.shape, record.dtype});
  }
}

std::shared_ptr<const TensorRecord> SectionSource::record(const std::string& name) const {
  const TensorMap& all = *index_.tensors(section_);
  const auto found = all.find(name);
  require(found != all.end(), "checkpoint {} holds no tensor {} in section {}", dir_.string(), name,
          section_.name());
  return {std::shared_ptr<const void>(), &found->second};  // the index owns it
}

File SectionSource::open_file(const std::string& name) const {
  File file = File::open(dir_ / name, Links::Refuse);
  if (!check_headers_) return file;
  const FileIdentity identity = file.identity();
  {
    const std::lock_guard lock(mutex_);
    const auto known = identities_.find(name);
    if (known != identities_.end() && known->second == identity) return file;
  }
  read_shard_header(file, name, index_);
  const std::lock_guard lock(mutex_);
  identities_[name] = identity;
  return file;
}

std::string SectionSource::title(const std::string& name) const {
  return fmt::format("{}/{}", section_.name(), name);
}

}  // namespace tessera::io
