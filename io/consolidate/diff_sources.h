#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint/diff.h"
#include "io/consolidate/consolidate.h"

namespace tessera::io {

struct SourceDiffOptions {
  DiffOptions diff{};
  NameRules names{};  ///< for other programs' shards; a rule may match nothing on one side
  /// As in ConsolidateOptions, for other programs' shards on both sides.
  std::optional<fs::path> config_file{}, like{};
  std::optional<std::int64_t> step{};  ///< of runs of tessera
  /// As in ConsolidateOptions.
  std::function<void(std::int64_t done, std::int64_t total)> checked{};
};

struct SourceDiff {
  struct Side {
    std::string kind;  ///< as in ConsolidateReport
    fs::path path;
    std::vector<SkippedEntry> skipped;  ///< entries that are not compared
    std::vector<std::string> warnings;
  };
  Side a, b;
  /// Names as in a Hugging Face directory: "model/model.norm.weight", "optimizer/exp_avg/NAME".
  DiffReport report;
};

/// Compares sources of any kind that consolidate() reads, under the names that it would write.
///
/// Other programs' shards without a known configuration have that of the other side, if it is in a
/// file, or else the names of the other side, if that is a Hugging Face directory. Tensors that are
/// not the model's are compared, too. Files with a seal are first compared with it.
/// @throws Unsupported if optimizer state of tessera and of another program would be compared; as
///         open_consolidate_source and diff_checkpoints
SourceDiff diff_sources(const fs::path& a, const fs::path& b, const SourceDiffOptions& options);

}  // namespace tessera::io
