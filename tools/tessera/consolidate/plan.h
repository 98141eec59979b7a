#pragma once

#include <string>

#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {

/// {"source", "kind", "tensors": [{"source", "name", "dtype", "written", "shape", "bytes",
/// "file"}], "files": {NAME: bytes}, "skipped": [{"name", "why"}], "bytes", "warnings": [text]}
/// with the dtype names of safetensors.
io::Json plan_json(const io::ConsolidatePlan& plan);

/// Formats the plan as text: a line for each tensor, with its name in the source if it was renamed,
/// and one line for skipped entries.
/// @param label  starts the line with the number of tensors
std::string format_plan(const io::ConsolidatePlan& plan, const ConsoleStyle& style,
                        const std::string& label = "would write");

/// Number of skipped entries by reason: "12 (optimizer state); 2 (no tensor)"; empty if none.
std::string format_skipped(const std::vector<io::SkippedEntry>& skipped);

}  // namespace tessera::tools
