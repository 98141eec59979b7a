#include "tools/tessera/train/rank_zero.h"

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
  const std::string answer = store.get(key, deadline);
  if (!answer.starts_with('+')) {
    throw CommError(CommFailure::Aborted, {0}, "rank 0 failed: {}", answer.substr(1));
  }
  return answer.substr(1);
}

}  // namespace tessera::tools
