#include "tools/tessera/train/rank_zero.h"

#include "comm/control/agreement.h"
#include "core/base/error.h"

namespace tessera::tools {

std::string decide_on_rank_zero(comm::Store& store, const std::string& name, int rank,
                                std::chrono::milliseconds deadline,
                                const std::function<std::string()>& decide) {
  const std::string key = "decision/" + name;
  if (rank == 0) {
    try {
      std::string result = decide();
      store.set(key, "+" + result);
      return result;
    } catch (const std::exception& error) {
      store.set(key, std::string("-") + error.what());
      throw;
    }
  }
  const std::string answer = [&] {
    try {
      return comm::get_or_verdict(store, key, deadline);
    } catch (const CommError& error) {
      if (error.failure() != CommFailure::Timeout) throw;
      throw CommError(CommFailure::Timeout, {0},
                      "rank 0 did not decide on {} within {} s; check its disk, or raise "
                      "checkpoint.load_timeout",
                      name, static_cast<double>(deadline.count()) / 1e3);
    }
  }();
  if (!answer.starts_with('+')) {
    throw CommError(CommFailure::Aborted, {0}, "rank 0 failed: {}", answer.substr(1));
  }
  return answer.substr(1);
}

}  // namespace tessera::tools
