#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "tests/comm/fake_nccl_ranks.h"
#include "tests/comm/ranks.h"

namespace tessera::test {

/// Ranks in rows and columns: rank = row * columns + column.
struct Mesh {
  int rows = 1, columns = 1;

  int size() const { return rows * columns; }
  std::vector<int> row_of(int rank) const {
    std::vector<int> ranks;
    for (int c = 0; c < columns; ++c) ranks.push_back(rank / columns * columns + c);
    return ranks;
  }
  std::vector<int> column_of(int rank) const {
    std::vector<int> ranks;
    for (int r = 0; r < rows; ++r) ranks.push_back(r * columns + rank % columns);
    return ranks;
  }
};

/// A rank's communicators: the world, and the groups of its row ("shard") and column ("replicate").
struct MeshRank {
  std::unique_ptr<comm::Communicator> world, shard, replicate;

  MeshRank(std::unique_ptr<comm::Communicator> all, const Mesh& mesh) : world(std::move(all)) {
    shard = world->split(mesh.row_of(world->rank()), "shard");
    replicate = world->split(mesh.column_of(world->rank()), "replicate");
  }
  std::vector<comm::Communicator*> all() const {
    return {world.get(), shard.get(), replicate.get()};
  }
};

/// Ranks within the test process over any backend: those of Group, or "nccl" (fake).
class AnyRanks {
 public:
  AnyRanks(const std::string& backend, int world, std::chrono::milliseconds timeout = 20s)
      : timeout_(timeout) {
    if (backend == "nccl") {
      fake_.emplace(world);
      fake_->timeout = timeout;
    } else {
      group_.emplace(backend, world);
    }
  }
  std::unique_ptr<comm::Communicator> join(int rank) {
    return fake_ ? fake_->join(rank) : group_->join(rank, {.timeout = timeout_});
  }
  FakeRanks* fake() { return fake_ ? &*fake_ : nullptr; }

 private:
  const std::chrono::milliseconds timeout_;
  std::optional<Group> group_;
  std::optional<FakeRanks> fake_;
};

}  // namespace tessera::test
