#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/sharding/sharded_model.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/train/memory_plan.h"
#include "tools/tessera/train/setup.h"
#include "train/metrics.h"

namespace tessera::tools {

/// Table at the start of a run: model, sharding, batch, data, memory by category.
std::string start_table(const ConsoleStyle& style, const RunSetup& setup,
                        const comm::ShardedModel& sharded, const comm::Communicator& communicator,
                        Context& context, const RankPlan& plan);

/// Summary at the end of a run: losses with a sparkline, speed, memory, files, the next command.
/// @param signal  the signal that stopped the run, or 0
/// @param saved   step of the run's newest checkpoint, if any
std::string end_summary(const ConsoleStyle& style, const RunSetup& setup,
                        const train::MetricsWriter& metrics, const train::TrainerState& state,
                        std::int64_t first_step, double seconds, int signal,
                        std::optional<std::int64_t> saved, const Context& context,
                        const RankPlan& plan);

}  // namespace tessera::tools
