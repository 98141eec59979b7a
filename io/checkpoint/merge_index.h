#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "io/base/json.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// Merges the ranks' parts of an index (see write_shard), with one part in memory at a time.
struct IndexMerger {
  Json files = Json::object(), sections = Json::object();  ///< as in the index

  /// @param shard  name of the rank's file
  /// @param text   the part, as JSON; source: its name in errors
  /// @throws CorruptCheckpoint if it is malformed, or contradicts an earlier part on a tensor
  void add(const std::string& shard, std::string_view text, const std::string& source);

  /// @param frame  the index without files and tensors
  /// @throws CorruptCheckpoint if the parts do not cover every tensor
  CheckpointIndex finish(const CheckpointIndex& frame, const std::string& source);

 private:
  Json tensors_ = Json::object();  // by section_name() and name
};

}  // namespace tessera::io
