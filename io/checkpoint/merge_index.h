#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "io/base/json.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// Tensors of a section, as in the index and in a part of it.
Json tensors_to_json(const TensorMap& tensors);

/// Merges the parts of an index that ranks write (see write_shard), one part in memory at a time.
struct IndexMerger {
  Json files = Json::object(), sections = Json::object();  ///< fields of the index

  /// @param shard   file name of the rank's shard
  /// @param text    the rank's part of the index, as JSON
  /// @param source  named in errors
  /// @throws CorruptCheckpoint if it is malformed, or contradicts an earlier part on a tensor
  void add(const std::string& shard, std::string_view text, const std::string& source);

  /// @param frame  the index without files and tensors
  /// @throws CorruptCheckpoint if the parts together do not cover every tensor
  CheckpointIndex finish(const CheckpointIndex& frame, const std::string& source);

 private:
  Json tensors_ = Json::object();  // by Section::name() and name
};

}  // namespace tessera::io
