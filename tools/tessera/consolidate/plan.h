#pragma once

#include <string>

#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {

/// {"source", "kind", "tensors": [{"source", "name", "dtype", "written", "shape", "bytes",
/// "file"}], "files": {NAME: bytes}, "skipped": [{"name", "why"}], "bytes", "warnings": [text]};
/// dtypes as in safetensors.
io::Json plan_json(const io::ConsolidatePlan& plan);

/// The same for people: a line for each tensor, with the name it has at the source where that
/// differs, and one for what is skipped.
/// @param label  of how many tensors there are: "would write"
std::string format_plan(const io::ConsolidatePlan& plan, const ConsoleStyle& style,
                        const std::string& label = "would write");

/// How many entries are skipped for each reason, "12 optimizer state, ...; 2 no tensor"; empty if
/// none.
std::string format_skipped(const std::vector<io::SkippedEntry>& skipped);

}  // namespace tessera::tools
