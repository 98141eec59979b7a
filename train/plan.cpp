#include "train/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/control/memory_store.h"
#include "comm/planned.h"
#include "core/base/memory.h"

namespace tessera::train {

std::int64_t MemoryPlan::library_bytes() const {
  std::int64_t most_bytes = 0;
  for (const auto& [name, bytes] : libraries) most_bytes = std::max(most_bytes, bytes);
  return most_bytes;
}

MemoryPlan plan(const PlanOptions& options, const std::function<void(Rank&)>& program) {
  ContextOptions context = options.context;
  context.planned = options.context.device;
  context.device = {DeviceType::Meta, 0};
  MemoryPlan result;
  Rank rank;
  rank.context = Context::create(context);
  rank.context->ledger().record_peak();
  rank.communicator = comm::make_planned_communicator(rank.context, options.backend, options.rank,
                                                      options.world_size, options.links);
  rank.store = std::make_shared<comm::MemoryStore>();
  program(rank);

  const MemoryLedger& ledger = rank.context->ledger();
  result.peak = ledger.total().peak;
  result.at_peak = ledger.recorded_peak().by_category;
  result.most = category_peaks(ledger);
  result.workspace = workspace_peaks(ledger);
  result.reached_at =
      fmt::format("{}, {}", ledger.recorded_peak().phase, ledger.recorded_peak().owner);
  if (const MemoryLedger& host = rank.context->host_ledger(); &host != &ledger)
    result.host_peak = host.total().peak;
  result.flops = rank.context->planned_flops();
  const auto& libraries = rank.context->planned_libraries();
  result.libraries = {libraries.begin(), libraries.end()};
  return result;
}

std::string workspace_peaks(const MemoryLedger& ledger) {
  std::string text;
  for (const MemoryLedger::Line& line : ledger.lines())
    if (line.category == MemoryCategory::Workspace)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", line.owner, line.usage.peak);
  return text;
}

MemoryByCategory category_peaks(const MemoryLedger& ledger) {
  MemoryByCategory peaks{};
  for (std::size_t c = 0; c < peaks.size(); ++c)
    peaks[c] = ledger.usage(static_cast<MemoryCategory>(c)).peak;
  return peaks;
}

std::string describe(const MemoryByCategory& bytes) {
  std::string text;
  for (std::size_t c = 0; c < bytes.size(); ++c) {
    if (bytes[c] == 0) continue;
    text +=
        fmt::format("{}{} {}", text.empty() ? "" : ", ",
                    memory_category_name(static_cast<MemoryCategory>(c)), format_bytes(bytes[c]));
  }
  return text;
}

std::string describe(const MemoryPlan& plan) {
  return fmt::format("{}, reached at {}: {}", format_bytes(plan.peak), plan.reached_at,
                     describe(plan.at_peak));
}

}  // namespace tessera::train
