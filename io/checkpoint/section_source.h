#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/checkpoint/index.h"
#include "io/pump/tensor_source.h"
#include "io/safetensors/header.h"

namespace tessera::io {

/// Reads the header of a shard and compares it with the index.
/// @param name  the shard's name in the index
/// @throws CorruptCheckpoint if the header is malformed, or its step, run, world size or checksum
///         (if the index has one) differ from the index; IoError
SafetensorsHeader read_shard_header(const File& file, const std::string& name,
                                    const CheckpointIndex& index);

/// The tensors of one section of a checkpoint.
class SectionSource : public TensorSource {
 public:
  /// @param dir, index     must outlive this
  /// @param check_headers  compare each shard's header with the index on open
  SectionSource(const fs::path& dir, const CheckpointIndex& index, const Section& section,
                bool check_headers);

  const fs::path& path() const override { return dir_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override;
  File open_file(const std::string& name) const override;
  std::string title(const std::string& name) const override;

 private:
  const fs::path& dir_;
  const CheckpointIndex& index_;
  const Section section_;
  const bool check_headers_;
  std::vector<TensorInfo> tensors_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, FileIdentity> identities_;  // checked files; guarded by mutex_
};

}  // namespace tessera::io
