#include "tools/tessera/train/nonfinite.h"

#include <fmt/ranges.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::json;

Json to_json(const NonFiniteParameters& found) {
  // Other ranks need only the number of names.
  const comm::NonFinite& f = found.first;
  return {found.names.size(), f.parameter, f.count, f.numel, f.first, f.value};
}

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
  std::vector<std::size_t> others;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const NonFiniteParameters& here = ranks[rank].*place;
    if (here.names.empty()) continue;
    if (result.rank >= 0) {
      others.push_back(rank);
      continue;
    }
    result.rank = static_cast<int>(rank);
    result.found = here.first;
    if (here.names.size() > 1)
      more.push_back("and " + counted(std::ssize(here.names) - 1, "more parameter"));
  }
  if (!others.empty()) {
    more.push_back(
        fmt::format("also on rank{} {}", others.size() == 1 ? "" : "s", fmt::join(others, ", ")));
  }
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
}

std::string non_finite_word(double value) {
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

std::string encode(const StepFindings& findings) {
  return Json{findings.loss, to_json(findings.gradients), to_json(findings.sums),
              to_json(findings.weights)}
      .dump();
}

StepFindings decode_findings(const std::string& text) {
  const auto read = [](const Json& json) {
    NonFiniteParameters found;
    found.first = {json.at(1), json.at(2), json.at(3), json.at(4), json.at(5)};
    const auto count = json.at(0).get<std::size_t>();
    require(count <= 1'000'000, "{} parameters", count);
    for (std::size_t i = 0; i < count; ++i) found.names.insert(std::to_string(i));
    return found;
  };
  try {
    const Json json = Json::parse(text);
    return {json.at(0), read(json.at(1)), read(json.at(2)), read(json.at(3))};
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

}  // namespace tessera::tools
