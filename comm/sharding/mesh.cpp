#include "comm/sharding/mesh.h"

#include "comm/single.h"

namespace tessera::comm {

Mesh::Mesh(Communicator& world, int shard_size)
    : world_(&world), shard_(&world), replicate_(&world) {
  require(shard_size >= 1 && world.world_size() % shard_size == 0,
          "a mesh of {} ranks can't be divided into groups of {} that share out a model",
          world.world_size(), shard_size);
  if (shard_size == world.world_size()) {
    own_replicate_ = make_single_communicator();
    replicate_ = own_replicate_.get();
  } else if (shard_size == 1) {
    own_shard_ = make_single_communicator();
    shard_ = own_shard_.get();
  } else {
    throw Unsupported("a mesh of several groups of several ranks");
  }
}

}  // namespace tessera::comm
