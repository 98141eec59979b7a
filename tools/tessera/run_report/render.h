#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/tessera/report/console.h"
#include "tools/tessera/run_report/evidence.h"

namespace tessera::tools {

std::vector<std::string> next_steps(const RunEvidence& run, const Verdict& verdict);

/// One page: verdict, table of ranks, newest checkpoint, advice.
std::string render_text(const RunEvidence& run, const Verdict& verdict, std::int64_t now_wall_ns,
                        const ConsoleStyle& style);

/// {"run", "state", "culprits", "headline", "evidence", "ranks", "last_step", "last_loss",
/// "checkpoint", "next", "problems"}; a rank has "rank", "host", "pid", "process", "end", "text",
/// "phase", "step", "last" (label, state and age of a collective) and "problem".
nlohmann::json render_json(const RunEvidence& run, const Verdict& verdict,
                           std::int64_t now_wall_ns);

}  // namespace tessera::tools
