#include "comm/sharding/mesh.h"

#include <vector>

#include "comm/communicator.h"
#include "comm/single.h"

namespace tessera::comm {

Mesh::Mesh(Communicator& world) : Mesh(world, world.world_size()) {}

Mesh::~Mesh() = default;

Mesh::Mesh(Communicator& world, int shard_size)
    : world_(&world), shard_(&world), replicate_(&world) {
  require(shard_size >= 1 && world.world_size() % shard_size == 0,
          "a mesh of {} ranks can't be divided into shard groups of {}", world.world_size(),
          shard_size);
  const int size = world.world_size(), rank = world.rank();
  if (shard_size == size) {
    own_replicate_ = make_single_communicator();
    replicate_ = own_replicate_.get();
    return;
  }
  if (shard_size == 1) {
    own_shard_ = make_single_communicator();
    shard_ = own_shard_.get();
    return;
  }
  std::vector<int> shard, replicate;
  for (int r = 0; r < size; ++r) {
    if (r / shard_size == rank / shard_size) shard.push_back(r);
    if (r % shard_size == rank % shard_size) replicate.push_back(r);
  }
  own_shard_ = world.split(shard, "shard");
  own_replicate_ = world.split(replicate, "replicate");
  shard_ = own_shard_.get();
  replicate_ = own_replicate_.get();
}

}  // namespace tessera::comm
