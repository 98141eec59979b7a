#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "io/base/json.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// Makes one index of the parts that ranks wrote (see write_shard), one after the other: no more
/// than one of them is held beside the result.
class IndexMerger {
 public:
  /// @param frame  all but files and tensors
  explicit IndexMerger(CheckpointIndex frame);

  /// @param shard        name of the rank's file, and its size in bytes
  /// @param source       of the text, for errors
  /// @throws CorruptCheckpoint if it is no part, or tells otherwise of a tensor than one before it
  void add(const std::string& shard, std::int64_t shard_bytes, std::string_view text,
           const std::string& source);
  void set_trainer(TrainerSection trainer) { frame_.trainer = std::move(trainer); }

  /// Text of the index, which was parsed again: parts that do not cover every tensor make none.
  /// @throws CorruptCheckpoint
  std::string finish(const std::string& source) const;

 private:
  CheckpointIndex frame_;
  std::shared_ptr<Json> files_;
  std::shared_ptr<Json> tensors_;  // by section, as named in shards, and name
};

}  // namespace tessera::io
