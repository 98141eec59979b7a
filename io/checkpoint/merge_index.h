#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "io/base/json.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// Merges the ranks' parts of an index (see write_shard), with one part in memory at a time.
class IndexMerger {
 public:
  /// @param frame  the index without files and tensors
  explicit IndexMerger(CheckpointIndex frame);

  /// @param shard        name of the rank's file; shard_bytes: its size
  /// @param text         the part, as JSON; source: its name in errors
  /// @throws CorruptCheckpoint if it is malformed, or contradicts an earlier part on a tensor
  void add(const std::string& shard, std::int64_t shard_bytes, std::string_view text,
           const std::string& source);
  void set_trainer(TrainerSection trainer) { frame_.trainer = std::move(trainer); }

  /// Text of the index. @throws CorruptCheckpoint if the parts do not cover every tensor
  std::string finish(const std::string& source) const;

 private:
  CheckpointIndex frame_;
  std::shared_ptr<Json> files_;
  std::shared_ptr<Json> tensors_;  // by section_name() and name
};

}  // namespace tessera::io
