#include "train/fault_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "comm/control/agreement.h"
#include "comm/sharding/replica_check.h"

namespace tessera::train {
namespace {

int code_of(const CommError& error, bool met) {
  switch (error.failure()) {
    case CommFailure::PeerLost:
      return 42;
    case CommFailure::Timeout:
      return met ? 43 : 41;
    case CommFailure::Mismatch:
      return met ? 44 : 45;
    case CommFailure::Aborted:
      return 46;
  }
  return 46;
}

// @param stated  the culprit reported its error
std::string action_of(int code, bool stated) {
  if (stated) return "fix the error that this rank reports, then restart";
  switch (code) {
    case 41:
      return "start the ranks that are missing, or raise comm.init_timeout";
    case 44:
      return "a bug in the program: compare the collectives that the ranks call";
    case 45:
      return "start all ranks with the same program and configuration";
    default:
      return "restart; the run resumes from its newest checkpoint, if it has one";
  }
}

}  // namespace

std::string fault_line(const CommError& error, const comm::RankState& state,
                       const std::vector<comm::Hello>& ranks) {
  const int code = code_of(error, !ranks.empty());
  const bool stated =
      code == 46 || (code == 42 && (error.fate() == "error" || error.fate() == "out of memory"));
  std::string phase = state.collective.empty() ? state.phase : state.collective;
  if (const auto space = phase.find(" ("); space != phase.npos) phase.erase(space, 1);
  std::replace(phase.begin(), phase.end(), ' ', '_');
  std::string culprits;
  for (const int rank : error.culprits()) {
    culprits += fmt::format("{}rank {}", culprits.empty() ? "" : ", ", rank);
    std::string more = static_cast<std::size_t>(rank) < ranks.size()
                           ? ranks[static_cast<std::size_t>(rank)].process()
                           : std::string();
    if (!error.fate().empty()) more += (more.empty() ? "" : ", ") + error.fate();
    if (!more.empty()) culprits += " (" + more + ")";
  }
  // kNoAnswer without a culprit: the launcher, which serves the control channel, is unreachable.
  if (culprits.empty()) culprits = error.fate() == comm::kNoAnswer ? "launcher" : "unknown";
  if (error.culprits().empty() && !error.fate().empty()) culprits += ", " + error.fate();
  return fmt::format("E{:03} step={} phase={} culprit={} action={}: {}", code,
                     state.step < 0 ? std::string("none") : std::to_string(state.step),
                     phase.empty() ? "none" : phase, culprits, action_of(code, stated),
                     error.what());
}

bool tell_others(comm::Store& store, int rank, std::string_view process,
                 const std::exception& error) noexcept {
  if (dynamic_cast<const CommError*>(&error) != nullptr ||
      dynamic_cast<const NonFiniteLoss*>(&error) != nullptr ||
      dynamic_cast<const comm::ReplicaMismatch*>(&error) != nullptr)
    return false;
  const bool memory = dynamic_cast<const OutOfMemory*>(&error) != nullptr ||
                      dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  try {
    const std::string_view what = error.what();
    CommError verdict(CommFailure::PeerLost, {rank}, "rank {} ({}) {}: {}", rank, process,
                      memory ? "is out of memory" : "ended by an error",
                      what.substr(0, what.find('\n')));  // without the memory ledger
    comm::publish_verdict(store, verdict.set_fate(memory ? "out of memory" : "error"));
  } catch (const std::exception&) {
    // Ignored: the first error is reported.
  }
  return true;
}

}  // namespace tessera::train
