#include "train/nonfinite.h"

#include <fmt/ranges.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "comm/collective.h"
#include "core/base/error.h"

namespace tessera::comm {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NonFinite, parameter, count, numel, first, value)
}

namespace tessera::train {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NonFiniteParameters, count, first)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepFindings, loss, gradients, sums, weights)

namespace {

using Json = nlohmann::json;

// "17 of 4096 values, first at [5, 100] is nan"
std::string details(const comm::NonFinite& found) {
  return fmt::format("{} of {} values, first at {} is {}", found.count, found.numel, found.first,
                     found.value);
}

// The first rank with a finding; `more`: " (and 3 more parameters; also on rank 2)".
struct Blame {
  int rank = -1;
  comm::NonFinite found;
  std::string more;
};

Blame blame(std::span<const StepFindings> ranks, NonFiniteParameters StepFindings::*place) {
  Blame result;
  std::vector<std::string> more;
  std::vector<int> others;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const NonFiniteParameters& here = ranks[rank].*place;
    if (here.count == 0) continue;
    if (result.rank >= 0) {
      others.push_back(static_cast<int>(rank));
      continue;
    }
    result.rank = static_cast<int>(rank);
    result.found = here.first;
    if (here.count > 1)
      more.push_back(
          fmt::format("and {} more parameter{}", here.count - 1, here.count > 2 ? "s" : ""));
  }
  if (!others.empty()) more.push_back("also on " + comm::rank_list(others));
  if (!more.empty()) result.more = fmt::format(" ({})", fmt::join(more, "; "));
  return result;
}

constexpr const char* kLowerRate =
    "nothing was updated. Lower optim.lr or resume from an earlier checkpoint";

}  // namespace

void NonFiniteParameters::add(const std::vector<comm::NonFinite>& found) {
  for (const comm::NonFinite& one : found) {
    if (names.empty()) first = one;
    names.insert(one.parameter);
  }
  count = std::ssize(names);
}

std::string non_finite_word(double value) {
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

std::string encode(const StepFindings& findings) { return Json(findings).dump(); }

StepFindings decode_findings(const std::string& text) {
  try {
    return Json::parse(text).get<StepFindings>();
  } catch (const std::exception& error) {
    throw CommError(CommFailure::Mismatch, {},
                    "expected another rank's findings, found '{}' ({}); do all ranks run the same "
                    "build?",
                    text.substr(0, 200), error.what());
  }
}

std::string describe(const NonFiniteStep& step) {
  if (const Blame b = blame(step.ranks, &StepFindings::weights); b.rank >= 0) {
    return fmt::format(
        "step {}: the weights of {} are not finite on rank {}{}: {}; they were not finite before "
        "the "
        "step, and nothing was updated. Resume from an earlier checkpoint",
        step.step, b.found.parameter, b.rank, b.more, details(b.found));
  }
  if (const Blame b = blame(step.ranks, &StepFindings::gradients); b.rank >= 0) {
    const std::string& loss = step.ranks[static_cast<std::size_t>(b.rank)].loss;
    return fmt::format("step {}: the gradient of {} is not finite on rank {}{}: {}{}; {}",
                       step.step, b.found.parameter, b.rank, b.more, details(b.found),
                       loss.empty() ? "" : ", and so is its loss, " + loss, kLowerRate);
  }
  for (std::size_t rank = 0; rank < step.ranks.size(); ++rank) {
    if (step.ranks[rank].loss.empty()) continue;
    return fmt::format("step {}: the loss of rank {} is {}; {}", step.step, rank,
                       step.ranks[rank].loss, kLowerRate);
  }
  if (const Blame b = blame(step.ranks, &StepFindings::sums); b.rank >= 0) {
    return fmt::format(
        "step {}: the gradient of {} is finite on each rank, but its sum, which rank {} holds, is "
        "not{}: {}; {}",
        step.step, b.found.parameter, b.rank, b.more, details(b.found), kLowerRate);
  }
  const auto text = [](double value) {
    return std::isfinite(value) ? fmt::format("{:.6g}", value) : non_finite_word(value);
  };
  const std::string start = fmt::format("step {}: loss is {} and the gradient norm {}", step.step,
                                        text(step.loss), text(step.grad_norm));
  if (!step.finite_again) return fmt::format("{}; {}", start, kLowerRate);
  return start +
         ", but both came out finite when computed again: a transient fault of memory or "
         "arithmetic on one of the ranks is likely. Nothing was updated; resume from the last "
         "checkpoint, and check the hosts' hardware if it happens again";
}

}  // namespace tessera::train
