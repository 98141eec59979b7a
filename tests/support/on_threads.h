#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace tessera::test {

/// Runs body(rank) for `world` ranks: rank 0 on the calling thread, each other one on a new thread.
inline void on_threads(int world, const std::function<void(int)>& body) {
  std::vector<std::thread> ranks;
  for (int rank = 1; rank < world; ++rank) ranks.emplace_back(body, rank);
  body(0);
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace tessera::test
