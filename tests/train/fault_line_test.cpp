#include "train/fault_line.h"

#include <doctest/doctest.h>

using namespace tessera;
using train::fault_line;

namespace {

std::vector<comm::Hello> two_ranks() {
  std::vector<comm::Hello> ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    ranks[static_cast<std::size_t>(rank)].rank = rank;
    ranks[static_cast<std::size_t>(rank)].host = "node" + std::to_string(rank);
    ranks[static_cast<std::size_t>(rank)].pid = 70 + rank;
  }
  return ranks;
}

}  // namespace

TEST_CASE("a fault line contains the rank's position, the culprit and an action") {
  comm::RankState state;
  state.phase = "step";
  state.step = 1200;
  state.collective = "reduce_scatter#88 (h.3)";
  CommError error(CommFailure::PeerLost, {1}, "rank 1 (pid 71) was killed by SIGKILL");
  error.set_fate("SIGKILL");
  CHECK(train::fault_line(error, state, two_ranks()) ==
        "E042 step=1200 phase=reduce_scatter#88(h.3) culprit=rank 1 (node1, pid 71, SIGKILL) "
        "action=restart; the run resumes from its newest checkpoint, if it has one: rank 1 (pid "
        "71) was killed "
        "by SIGKILL");
}

TEST_CASE("each kind of failure has its code, with a different one at the start") {
  comm::RankState state;
  state.phase = "start";
  const auto code = [&](CommFailure failure, bool met) {
    return train::fault_line(CommError(failure, {0}, "x"), state,
                             met ? two_ranks() : std::vector<comm::Hello>())
        .substr(0, 4);
  };
  CHECK(code(CommFailure::Timeout, false) == "E041");
  CHECK(code(CommFailure::PeerLost, false) == "E042");
  CHECK(code(CommFailure::PeerLost, true) == "E042");
  CHECK(code(CommFailure::Timeout, true) == "E043");
  CHECK(code(CommFailure::Mismatch, true) == "E044");
  CHECK(code(CommFailure::Mismatch, false) == "E045");
  CHECK(code(CommFailure::Aborted, true) == "E046");
}

TEST_CASE("unknown facts are stated as unknown") {
  comm::RankState state;
  state.phase = "start";
  CHECK(train::fault_line(CommError(CommFailure::Timeout, {}, "nobody came"), state, {}) ==
        "E041 step=none phase=start culprit=unknown action=start the ranks that are missing, or "
        "raise comm.init_timeout: nobody came");
  CHECK(train::fault_line(CommError(CommFailure::PeerLost, {5, 7}, "x"), state, {})
            .find("culprit=rank 5, rank 7 action") != std::string::npos);
}

TEST_CASE("the action depends on the rank's fate") {
  for (const auto& [fate, action] : {std::pair("error", "fix the error that this rank"),
                                     {"out of memory", "fix the error that this rank"}}) {
    CAPTURE(fate);
    CommError error(CommFailure::PeerLost, {0, 1}, "why");
    error.set_fate(fate);
    const std::string line = train::fault_line(error, {}, two_ranks());
    CAPTURE(line);
    CHECK(line.find(std::string("action=") + action) != std::string::npos);
    CHECK(line.find(std::string(", ") + fate + "), rank 1 (") != std::string::npos);
  }
}
