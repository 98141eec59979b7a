#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/tessera/plot/run_metrics.h"

namespace tessera::tools {

/// Comma-separated values, one line per run and step: `run`, `step`, and the keys of metrics.jsonl. Absent and
/// null values are empty.
/// @param keys  empty: all
std::string to_csv(std::span<const RunMetrics> runs, const std::vector<std::string>& keys);

}  // namespace tessera::tools
